"""A pool that prepares batches of images ahead of the loop, in threads or in worker processes.

Pixels are written straight into the batch's slot, see `slots`. Images go to the threads, and from them to processes, in
groups, since a message costs as much as a small image. The pixels of large images that are decoded at a time are
bounded, see `budget`. In processes (see `isolation`), a decoder that crashes costs the image that it decoded and no
other, and an image may take only so long.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.budget import PixelBudget
from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.decoding.slots import PixelSlots, PreparedBatch
from opal_deploy.inference.decoding.task import PrepareRequest, PrepareTask
from opal_deploy.inference.isolation.pool import ProcessPool
from opal_deploy.inference.isolation.process import WorkerCrashed, WorkerProcess, WorkerTimeout
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Pixels, Prepared, Request
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import display_size

# decoded at a time, on average over the workers: two photographs of an ordinary camera pass side by side, and what is
# larger waits until the others are done. A pixel takes four bytes, while it is converted eight
PIXELS_PER_WORKER = 25_000_000
# images a message; the workers share a batch among them, as far as that leaves groups worth sending
MAX_GROUP, _SHARED_BY = 16, 4
_SHA256 = re.compile("[0-9a-f]{64}")


class Decoders(AbstractContextManager["Decoders"], Protocol):
    """What prepares batches of images; see `DecoderPool`."""

    @property
    def pixels(self) -> Pixels:
        """The slots: uint8 [slots, rows, H0, W0, 3]."""
        ...

    def submit(self, requests: Iterable[Request]) -> Future[PreparedBatch]:
        """Begin to prepare a batch, at most `rows` images, while they come."""
        ...


class DecoderPool:
    """A pool that prepares batches of images; a context manager, which closes it."""

    def __init__(
        self,
        options: InferenceOptions,
        input_size: tuple[int, int],
        timer: StageTimer = NO_OP_TIMER,
        *,
        slots: int,
        rows: int,
    ) -> None:
        """Start nothing yet.

        Args:
            options: `workers`, `isolate`, `decode_timeout`, and those that `prepare` reads.
            input_size: (H0, W0) of the model.
            timer: gets the times of the stages, under the role `decoders`.
            slots: batches that are there at a time, from `submit` to their release.
            rows: images a batch at most.

        Raises:
            MemoryError: there is no room for the slots. StoppedEarly: no memory can be shared with processes.
        """
        self._options, self._input_size, self._timer = options, input_size, timer
        self._slots = PixelSlots(slots, rows, input_size, shared=options.isolate)
        # a whole image is large: it is drawn, and dropped, before the next one comes
        self._group = 1 if options.keep_images else group_size(rows, options.workers)
        self._threads = ThreadPoolExecutor(
            options.workers, "decode", initializer=timer.register_thread, initargs=("decoders",)
        )
        self._budget = PixelBudget(PIXELS_PER_WORKER * options.workers)
        # of frames that wait, decoded by another process
        self._frames = PixelBudget(PIXELS_PER_WORKER * options.workers)
        self._processes: ProcessPool | None = None
        if (layout := self._slots.layout) is not None:
            # names stay here: no worker needs them
            task = PrepareTask(layout, replace(options, slot_names=None))
            self._processes = ProcessPool(options.workers, task, options.decode_timeout, timer, [layout.descriptor])

    @property
    def pixels(self) -> Pixels:
        """The slots: uint8 [slots, rows, H0, W0, 3]."""
        return self._slots.pixels

    def submit(
        self, requests: Iterable[Request], abandoned: Callable[[], bool] = lambda: False
    ) -> Future[PreparedBatch]:
        """Begin to prepare a batch, at most `rows` images, while they come.

        The future raises nothing that an image can cause; it raises StoppedEarly where no process can be started, and
        CancelledError where `abandoned` said, before the work began, that nobody waits for it any more.

        Raises:
            IndexError: no slot is free.
        """
        batch = _Batch(self._slots, abandoned)
        start = 0
        for request in requests:
            stop = batch.add(request)
            pixels = _count_frame_pixels(request)
            if pixels or stop - start == self._group:
                # a frame is in memory already: those behind it wait until there is room
                self._submit_rows(batch, start, stop, self._frames.acquire(pixels) if pixels else 0)
                start = stop
            # or the last frame would stay while the next one is waited for
            del request
        self._submit_rows(batch, start, len(batch.requests), 0)
        batch.close()
        return batch.future

    def _submit_rows(self, batch: _Batch, start: int, stop: int, held: int) -> None:
        if start == stop:
            return
        work = self._threads.submit(self._prepare_group, batch, start, stop)

        def finish(done: Future[None]) -> None:
            self._frames.release(held)
            # dropped before it began: nothing else would ever end the future
            if done.cancelled():
                batch.future.cancel()

        work.add_done_callback(finish)

    def close(self) -> None:
        """Drop what waits, finish what is in work, and end threads and processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()
        self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare_group(self, batch: _Batch, start: int, stop: int) -> None:
        """Prepare some images of a batch; what goes wrong beyond an image goes into the batch's future."""
        rows = range(start, stop)
        if batch.future.cancelled():
            return
        if batch.abandoned():
            batch.finish_rows(rows, CancelledError())
            return
        try:
            isolated = [row for row in rows if self._processes is not None and _has_decoder(batch.requests[row])]
            for row in rows:
                if row not in isolated:
                    batch.images[row] = self._prepare_here(batch, row)
            if self._processes is not None and isolated:
                self._prepare_isolated(self._processes, batch, isolated)
        except BaseException as error:  # somebody waits for the future
            batch.finish_rows(rows, error)
        else:
            batch.finish_rows(rows)

    def _prepare_here(self, batch: _Batch, row: int) -> Prepared:
        request, out = batch.requests[row], batch.pixels[row]
        with self._budget.lease() as claim:
            prepared = prepare(request, self._input_size, self._options, self._timer, claim, out)
        if not _count_frame_pixels(request):
            return prepared
        # nobody needs its pixels any more, and those of a batch may be gigabytes
        batch.requests[row] = replace(request, source=b"")
        return replace(prepared, request=batch.requests[row])

    def _prepare_isolated(self, processes: ProcessPool, batch: _Batch, rows: list[int]) -> None:
        messages = []
        for row in rows:
            request = batch.requests[row]
            # a path is pickled in a fraction of the time as text
            source = os.fspath(request.source) if isinstance(request.source, Path) else request.source
            messages.append(PrepareRequest(source, request.box, batch.slot, row, request.drawn))

        def read(process: WorkerProcess, header: dict[str, Any], position: int) -> Prepared:
            return _read_prepared(batch.requests[rows[position]], process, header)

        with self._budget.lease() as claim:
            answers = processes.call_group(messages, read, claim)
        for row, answer in zip(rows, answers, strict=True):
            if not isinstance(answer, Prepared):
                answer = Prepared(batch.requests[row], error=self._build_error(answer))
            batch.images[row] = answer

    def _build_error(self, failure: WorkerCrashed | WorkerTimeout) -> ImageError:
        if isinstance(failure, WorkerCrashed):
            return ImageError("decoder_crashed", f"its decoder {failure}")
        limit = self._options.decode_timeout
        return ImageError("decode_timeout", f"it was not decoded within {limit:g} s; raise --decode-timeout")


def _read_prepared(request: Request, process: WorkerProcess, header: dict[str, Any]) -> Prepared:
    digest = header["sha256"]
    if digest is not None and not _SHA256.fullmatch(digest):
        raise ValueError("no sha256")
    if "error" in header:
        code, message = header["error"]
        return Prepared(request, error=ImageError(str(code), str(message)), image_sha256=digest)
    x0, y0, x1, y1 = map(int, header["crop"])
    geometry = Geometry(int(header["width"]), int(header["height"]), (x0, y0, x1, y1))
    image = None
    if header["image"]:
        size = display_size(geometry.width, geometry.height)
        whole = np.empty(3 * size[0] * size[1], np.uint8)
        process.read_into(whole.data)
        image = Image.frombuffer("RGB", size, whole, "raw", "RGB", 0, 1)
    return Prepared(request, geometry, None, image, image_sha256=digest)


class _Batch:
    """A batch whose groups are being prepared, by several threads, while one adds images to it."""

    def __init__(self, slots: PixelSlots, abandoned: Callable[[], bool]) -> None:
        self.requests: list[Request] = []
        self.slot, self.abandoned = slots.acquire(), abandoned
        self._release = partial(slots.release, self.slot)
        self.pixels = slots.pixels[self.slot]
        self.images: list[Prepared | None] = []
        self.future: Future[PreparedBatch] = Future()
        # images that are not done, and one for whoever adds them
        self._remaining, self._lock = 1, threading.Lock()
        self._error: BaseException | None = None

    def add(self, request: Request) -> int:
        """Add an image, and return how many there are."""
        with self._lock:
            self._remaining += 1
        self.images.append(None)
        self.requests.append(request)
        return len(self.requests)

    def close(self) -> None:
        """Let the batch end with the images that it has."""
        self._count_done(1)

    def finish_rows(self, rows: range, error: BaseException | None = None) -> None:
        """Count rows as done, or as failed with an error, which is the whole batch's."""
        for row in rows:
            image = self.images[row]
            if image is None or image.error is not None:
                self.pixels[row] = 0
        self._count_done(len(rows), error)

    def _count_done(self, count: int, error: BaseException | None = None) -> None:
        with self._lock:
            self._error = self._error or error
            self._remaining -= count
            if self._remaining:
                return
        if self._error is not None:
            self._release()
        if not self.future.set_running_or_notify_cancel():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            images = tuple(image for image in self.images if image is not None)
            self.future.set_result(PreparedBatch(images, self.pixels, self._release))


def group_size(rows: int, workers: int) -> int:
    """Return how many images of a batch of `rows` go to a worker at a time."""
    return max(1, min(MAX_GROUP, rows // min(workers, _SHARED_BY)))


def _count_frame_pixels(request: Request) -> int:
    """Return the number of pixels of a frame of a video, which are in memory; 0 for every other image."""
    if request.frame is None or not isinstance(request.source, np.ndarray):
        return 0
    height, width, *_ = request.source.shape
    return int(height * width)


def _has_decoder(request: Request) -> bool:
    # an error needs no process, and pixels in memory have no decoder left that could crash
    return request.error is None and not isinstance(request.source, Image.Image | np.ndarray)
