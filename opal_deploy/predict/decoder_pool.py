"""A pool that prepares batches of images ahead of the loop, in threads or in worker processes.

Pixels are written straight into the batch's slot, see `pixel_slots`. Images go to threads, and from there to
processes, in groups, since a message costs as much as a small image. The pixels of large images decoded at a time are
limited, see `decode_budget`. In processes (see `workers`), a decoder that crashes or hangs costs only its image.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.predict.decode_budget import FairSemaphore
from opal_deploy.predict.pixel_slots import PixelSlots, PreparedBatch, SlotLayout
from opal_deploy.predict.prepare import ReadAhead, is_remote, prepare
from opal_deploy.predict.types import InferenceOptions, Pixels, Prepared
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import display_size
from opal_deploy.sources.image import InputImage, SpooledMember
from opal_deploy.timing import NO_OP_TIMER, StageTimer

if TYPE_CHECKING:
    from opal_deploy.workers.pool import ProcessPool
    from opal_deploy.workers.process import WorkerCrashed, WorkerTimeout
    from opal_deploy.workers.worker import Data, Response

# decoded at a time, on average per worker: two photographs of an ordinary camera pass side by side, larger ones wait. A
# pixel takes four bytes, eight during conversion
PIXELS_PER_WORKER = 25_000_000
# bytes from which on a file that waits in memory counts towards the same limit
_LARGE_FILE = 1 << 20
# images per message; workers share a batch if that leaves groups worth sending
MAX_GROUP, _SHARED_BY = 16, 4
_SHA256 = re.compile("[0-9a-f]{64}")


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
            options: how images are decoded.
            input_size: (H0, W0) of the model.
            timer: receives the times of the stages, under the role `decoders`.
            slots, rows: maximum batches between `submit` and their release, and maximum images per batch.

        Raises:
            MemoryError: the slots do not fit into memory. StoppedEarly: memory cannot be shared with processes.
        """
        self._options, self._input_size, self._timer = options, input_size, timer
        self._slots = PixelSlots(slots, rows, input_size, shared=options.isolate)
        # a whole image is large: it is drawn and dropped before the next one arrives
        self._group = 1 if options.keep_images else group_size(rows, options.workers)
        self._threads = ThreadPoolExecutor(
            options.workers, "decode", initializer=timer.register_thread, initargs=("decoders",)
        )
        self._budget = FairSemaphore(PIXELS_PER_WORKER * options.workers)
        # of waiting frames, which another process decoded, and of large files in memory and temporary files
        self._held = FairSemaphore(PIXELS_PER_WORKER * options.workers)
        self._processes: ProcessPool | None = None
        if (layout := self._slots.layout) is not None:
            from opal_deploy.workers.pool import ProcessPool

            # no worker needs the names
            task = PrepareTask(layout, replace(options, slot_names=None))
            self._processes = ProcessPool(options.workers, task, options.decode_timeout, timer, [layout.descriptor])

    @property
    def pixels(self) -> Pixels:
        """The slots: uint8 [slots, rows, H0, W0, 3]."""
        return self._slots.pixels

    def submit(
        self, images: Iterable[InputImage], abandoned: Callable[[], bool] = lambda: False
    ) -> Future[PreparedBatch]:
        """Begin to prepare a batch of at most `rows` images, as they arrive; raise IndexError if no slot is free.

        The future raises nothing that an image can cause. It raises StoppedEarly if no process can be started, and
        CancelledError if `abandoned` returned True before the work began.
        """
        batch = _Batch(self._slots, abandoned)
        start = 0
        for image in images:
            stop = batch.add(image)
            pixels = _count_held_pixels(image)
            if pixels or stop - start == self._group:
                # it is in memory already: those after it wait for room
                self._submit_rows(batch, start, stop, self._held.acquire(pixels) if pixels else 0)
                start = stop
            # the last one must not stay in memory until the next one arrives
            del image
        self._submit_rows(batch, start, len(batch.inputs), 0)
        batch.close()
        return batch.future

    def _submit_rows(self, batch: _Batch, start: int, stop: int, held: int) -> None:
        if start == stop:
            return
        work = self._threads.submit(self._prepare_group, batch, start, stop)

        def finish(done: Future[None]) -> None:
            self._held.release(held)
            # dropped before it began: nothing else would end the future
            if done.cancelled():
                batch.future.cancel()

        work.add_done_callback(finish)

    def close(self) -> None:
        """Drop queued work, finish work in flight, and end threads and processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()
        self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _prepare_group(self, batch: _Batch, start: int, stop: int) -> None:
        """Prepare some images of a batch; an error that no image caused goes into the batch's future."""
        rows = range(start, stop)
        if batch.future.cancelled():
            return
        if batch.abandoned():
            batch.finish_rows(rows, CancelledError())
            return
        try:
            isolated = [row for row in rows if self._processes is not None and _has_decoder(batch.inputs[row])]
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
        image, out = batch.inputs[row], batch.pixels[row]
        with self._budget.lease() as claim:
            prepared = prepare(image, self._input_size, self._options, self._timer, claim, out)
        return replace(prepared, input=batch.drop_source(row))

    def _prepare_isolated(self, processes: ProcessPool, batch: _Batch, rows: list[int]) -> None:
        messages = []
        for row in rows:
            image = batch.inputs[row]
            # a path is pickled in a fraction of the time as text
            source = os.fspath(image.source) if isinstance(image.source, os.PathLike) else image.source
            messages.append((InputImage(None, source, image.crop, drawn=image.drawn), batch.slot, row))
        with self._budget.lease() as claim:
            answers = processes.call_group(messages, _read_prepared, claim)
        for row, answer in zip(rows, answers, strict=True):
            if not isinstance(answer, Prepared):
                answer = Prepared(_UNNAMED, error=self._build_error(answer))
            batch.images[row] = replace(answer, input=batch.drop_source(row))

    def _build_error(self, failure: WorkerCrashed | WorkerTimeout) -> ImageError:
        from opal_deploy.workers.process import WorkerCrashed

        if isinstance(failure, WorkerCrashed):
            return ImageError("decoder_crashed", f"its decoder {failure}")
        limit = self._options.decode_timeout
        return ImageError("decode_timeout", f"it was not decoded within {limit:g} s; raise --decode-timeout")


# an image, and the slot and row for its pixels
_Row: TypeAlias = tuple[InputImage, int, int]


@dataclass(frozen=True)
class PrepareTask:
    """The task of a decode process: prepare one image, and write its pixels into their row of `layout`."""

    layout: SlotLayout
    options: InferenceOptions

    @cached_property
    def _slots(self) -> Pixels:
        return self.layout.open()

    @cached_property
    def _read_ahead(self) -> ReadAhead:
        return ReadAhead()

    def prepare_group(self, group: list[_Row]) -> Iterable[_Row]:
        """Return the group; remote images are read while those before them are decoded."""
        sources = [image.source for image, _, _ in group]
        if not any(map(is_remote, sources)):
            return group
        read = self._read_ahead.read(sources)
        return (
            (replace(image, source=source), slot, row) for (image, slot, row), source in zip(group, read, strict=True)
        )

    def __call__(self, request: _Row, timer: StageTimer, claim: Callable[[int], None]) -> Response:
        """Return the image's digest, geometry or error, and the reduced image if it is kept."""
        image, slot, row = request
        _, _, height, width, _ = self.layout.shape
        prepared = prepare(image, (height, width), self.options, timer, claim, out=self._slots[slot, row])
        header: dict[str, Any] = {"sha256": prepared.image_sha256}
        if prepared.error is not None:
            return {**header, "error": [prepared.error.code, str(prepared.error)]}, []
        assert prepared.geometry is not None  # there is no error
        header |= vars(prepared.geometry)
        return header, [] if prepared.image is None else [prepared.image.tobytes()]


# in place of the image that the calling process knows
_UNNAMED = InputImage(None, b"")


def _read_prepared(header: dict[str, Any], parts: Sequence[Data]) -> Prepared:
    digest = header["sha256"]
    if digest is not None and not _SHA256.fullmatch(digest):
        raise ValueError("no sha256")
    if "error" in header:
        code, message = header["error"]
        return Prepared(_UNNAMED, error=ImageError(str(code), str(message)), image_sha256=digest)
    x0, y0, x1, y1 = map(int, header["crop"])
    geometry = Geometry(int(header["width"]), int(header["height"]), (x0, y0, x1, y1))
    image = None
    if parts:
        size = display_size(geometry.width, geometry.height)
        image = Image.frombuffer("RGB", size, np.frombuffer(parts[0], np.uint8), "raw", "RGB", 0, 1)
    return Prepared(_UNNAMED, geometry, None, image, image_sha256=digest)


class _Batch:
    """A batch whose groups are being prepared, by several threads, while one adds images to it."""

    def __init__(self, slots: PixelSlots, abandoned: Callable[[], bool]) -> None:
        self.inputs: list[InputImage] = []
        self.slot, self.abandoned = slots.acquire(), abandoned
        self._release = partial(slots.release, self.slot)
        self.pixels = slots.pixels[self.slot]
        self.images: list[Prepared | None] = []
        self.future: Future[PreparedBatch] = Future()
        # images that are not done, and one for the thread that adds them
        self._remaining, self._lock = 1, threading.Lock()
        self._error: BaseException | None = None

    def add(self, image: InputImage) -> int:
        """Add an image, and return their number."""
        with self._lock:
            self._remaining += 1
        self.images.append(None)
        self.inputs.append(image)
        return len(self.inputs)

    def drop_source(self, row: int) -> InputImage:
        """Return an image that was prepared, without a large source: a batch's sources may be gigabytes."""
        image = self.inputs[row]
        if _count_held_pixels(image):
            self.inputs[row] = image = replace(image, source=b"")
        return image

    def close(self) -> None:
        """End the batch with the images that it has."""
        self._count_done(1)

    def finish_rows(self, rows: range, error: BaseException | None = None) -> None:
        """Count rows as done, or the whole batch as failed with an error."""
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


def _count_held_pixels(image: InputImage) -> int:
    """Return how much memory or disk an image takes before it is decoded, in pixels; 0 for most images.

    A frame of a video takes its pixels; a large file in memory or a temporary file, four bytes for a pixel.
    """
    if isinstance(image.source, np.ndarray):
        height, width, *_ = image.source.shape
        return 0 if image.frame is None else int(height * width)
    if isinstance(image.source, SpooledMember):
        return image.source.size // 4
    return len(image.source) // 4 if isinstance(image.source, bytes) and len(image.source) > _LARGE_FILE else 0


def _has_decoder(image: InputImage) -> bool:
    # pixels in memory have no decoder that could crash
    return image.error is None and not isinstance(image.source, Image.Image | np.ndarray)
