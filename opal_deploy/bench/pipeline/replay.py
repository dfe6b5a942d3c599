"""Stand-ins for the network and for decoding, so that the rest of the pipeline can be measured."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Self, cast

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.inference.decoding.slots import PixelSlots, PreparedBatch
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Pixels, Prepared, Request
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.session import ImageBatch, Session, check_batch


class ReplaySession:
    """A session that replays precomputed outputs, in order and again from the first.

    Attributes:
        metadata: the model's, so that records and overlays take the same work.
        description: names the session that computed the outputs.
    """

    def __init__(self, metadata: Metadata, outputs: Outputs, origin: str) -> None:
        self.metadata = metadata
        self.description = f"no network: outputs precomputed by {origin}"
        self._count = len(outputs)
        self._next = 0
        # twice, so that a batch that wraps around is a view too
        self._outputs = Outputs.concatenate([outputs, outputs])

    @staticmethod
    def record(session: Session, batches: Iterable[ImageBatch]) -> ReplaySession:
        """Return a session that replays the outputs of `session` for `batches`."""
        outputs = Outputs.concatenate([session.run(batch) for batch in batches])
        return ReplaySession(session.metadata, outputs, session.description)

    def run(self, images: ImageBatch) -> Outputs:
        """Return the next outputs as views, as `Session.run` does.

        Raises:
            ValueError: the batch is larger than the number of precomputed outputs.
        """
        check_batch(images, self.metadata)
        if len(images) > self._count:
            raise ValueError(f"a batch of {len(images)}, but only {self._count} outputs were precomputed")
        start = self._next
        self._next = (start + len(images)) % self._count
        return self._outputs.rows(start, start + len(images))


class HeldSession(ReplaySession):
    """A replay with a simulated device that holds each batch for a time, one after the other, with three in flight.

    Attributes:
        busy: seconds that the device held batches.
    """

    depth = 3

    def __init__(self, replay: ReplaySession, seconds: float) -> None:
        """Start the device, which holds each batch of a replay for some seconds."""
        vars(self).update(vars(replay))
        self.description += f", each batch held for {seconds * 1e3:g} ms"
        self.busy, self._seconds = 0.0, seconds
        self._batches: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._hold, name="held-session", daemon=True).start()

    def submit(self, images: ImageBatch) -> object:
        """See `PipelinedSession.submit`."""
        done = threading.Event()
        self._batches.put(done)
        return images, done

    def collect(self, handle: object) -> Outputs:
        """See `PipelinedSession.collect`."""
        images, done = cast(tuple[ImageBatch, threading.Event], handle)
        done.wait()
        return self.run(images)

    def _hold(self) -> None:
        while True:
            done = self._batches.get()
            started = time.perf_counter()
            time.sleep(self._seconds)
            self.busy += time.perf_counter() - started
            done.set()


class ReplayDecoders:
    """Decoders whose pixels are in their slots from the start."""

    def __init__(
        self, options: InferenceOptions, input_size: tuple[int, int], timer: StageTimer, *, slots: int, rows: int
    ) -> None:
        """Take the arguments of `DecoderPool`; options and timer are unused."""
        self._slots = PixelSlots(slots, rows, input_size, shared=False)
        self._geometry = Geometry.whole(input_size[1], input_size[0])

    @property
    def pixels(self) -> Pixels:
        """See `Decoders.pixels`."""
        return self._slots.pixels

    def submit(self, requests: Iterable[Request]) -> Future[PreparedBatch]:
        """Return a future that is done."""
        slot = self._slots.acquire()
        future: Future[PreparedBatch] = Future()
        images = tuple(Prepared(request, self._geometry, image_sha256="0" * 64) for request in requests)
        future.set_result(PreparedBatch(images, self._slots.pixels[slot], partial(self._slots.release, slot)))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._slots.close()
