"""A pool that prepares batches of images ahead of the loop, in threads or in worker processes.

Pixels are written straight into the batch's slot, which processes share. Images go to threads, and from there to
processes, in groups, since a message costs as much as a small image. In processes, a decoder that crashes or hangs
costs only its image: the images of its group are decoded again, one at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
from PIL import Image

from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.errors import ImageError
from opal_deploy.predict.prepare import InferenceOptions, Pixels, Prepared, prepare, raise_pillow_limit, read_remote
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool, WorkerTimeout, create_shared_memory, map_shared_memory

# images per message; workers share a batch if that leaves groups worth sending
MAX_GROUP, _SHARED_BY = 16, 4


@dataclass(frozen=True)
class PreparedBatch:
    """Images that are ready for a session.

    Attributes:
        images: everything but their pixels.
        pixels: uint8 [rows, H0, W0, 3] in a slot, with at least as many rows as images; zeros for an image with an
            error.
        release: gives the slot back; nothing may read `pixels` after it.
    """

    images: tuple[Prepared, ...]
    pixels: Pixels
    release: Callable[[], None]


class PixelSlots:
    """Numbered slots of `rows` images each; every method may be called from any thread.

    Attributes:
        pixels: uint8 [slots, rows, H0, W0, 3].
        descriptor: of the memory that processes share; None if it is private.
    """

    def __init__(self, slots: int, rows: int, input_size: tuple[int, int], *, shared: bool) -> None:
        """Create the slots, allocated on first use; raise MemoryError, or StoppedEarly if memory cannot be shared."""
        shape = (slots, rows, *input_size, 3)
        self.descriptor = create_shared_memory(math.prod(shape)) if shared else None
        self.pixels = np.zeros(shape, np.uint8) if self.descriptor is None else _map_slots(self.descriptor, shape)
        # the slot used last comes first: it is in the caches, and a short run touches few
        self._free = list(range(slots))
        self._lock = threading.Lock()

    def acquire(self) -> int:
        """Take a free slot; raise IndexError if there is none."""
        with self._lock:
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back, which nothing reads or writes any more."""
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Close the descriptor; the memory lives until its last user ends."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def _map_slots(descriptor: int, shape: tuple[int, ...]) -> Pixels:
    """Return the slots in shared memory, which is unmapped when the array is gone."""
    return np.frombuffer(map_shared_memory(descriptor, math.prod(shape)), np.uint8).reshape(shape)


# in a worker process, which belongs to one pool
_map_slots_once = functools.cache(_map_slots)


class PendingBatch:
    """A batch whose images are being prepared."""

    def __init__(self, groups: Sequence[Future[list[Prepared]]], pixels: Pixels, release: Callable[[], None]) -> None:
        self._groups, self._pixels, self._release = groups, pixels, release

    def result(self) -> PreparedBatch:
        """Wait for the images; raise StoppedEarly if no process can be started."""
        try:
            images = tuple(itertools.chain.from_iterable(group.result() for group in self._groups))
        except BaseException:
            self.cancel()
            raise
        for row, image in enumerate(images):
            if image.error is not None:
                self._pixels[row] = 0
        return PreparedBatch(images, self._pixels, self._release)

    def add_done_callback(self, function: Callable[[PendingBatch], None]) -> None:
        """Call `function`, in any thread, once a batch of one image is done."""
        (group,) = self._groups
        group.add_done_callback(lambda _: function(self))

    def cancel(self) -> None:
        """Drop the work that has not begun, wait for the rest, and give the slot back."""
        wait([group for group in self._groups if not group.cancel()])
        self._release()


class DecoderPool:
    """A pool that prepares batches of images; a context manager, which closes it.

    Attributes:
        pixels: the slots: uint8 [slots, rows, H0, W0, 3].
        processes: the worker processes, which may do other work too; None without `isolate`.
    """

    def __init__(
        self, options: InferenceOptions, form: InputForm, timer: StageTimer = NO_OP_TIMER, *, slots: int, rows: int
    ) -> None:
        """Start nothing yet.

        Args:
            options, form: how images are decoded, and the form of the model's input.
            timer: receives the times of the stages, under the role `decoders`.
            slots, rows: maximum batches between `submit` and their release, and maximum images per batch.

        Raises:
            MemoryError: the slots do not fit into memory. StoppedEarly: memory cannot be shared with processes.
        """
        # no worker needs the names
        self._options, self._form = replace(options, slot_names=None), form
        self._timer = timer
        self._slots = PixelSlots(slots, rows, form.size, shared=options.isolate)
        self.pixels = self._slots.pixels
        # a whole image is large: it is drawn and dropped before the next one arrives
        self._group = 1 if options.keep_images else group_size(rows, options.workers)
        self._threads = ThreadPoolExecutor(
            options.workers, "decode", initializer=timer.register_thread, initargs=("decoders",)
        )
        self.processes: WorkerPool | None = None
        if self._slots.descriptor is not None:
            self.processes = WorkerPool(options.workers, options.decode_timeout, [self._slots.descriptor])

    def submit(self, images: Iterable[InputImage], abandoned: Callable[[], bool] = lambda: False) -> PendingBatch:
        """Begin to prepare a batch of at most `rows` images, as they arrive; raise IndexError if no slot is free.

        The result raises nothing that an image can cause. It raises StoppedEarly if no process can be started, and
        CancelledError if `abandoned` returned True before the work began.
        """
        slot = self._slots.acquire()
        numbered = enumerate(images)
        groups = []
        while group := dict(itertools.islice(numbered, self._group)):
            groups.append(self._threads.submit(self._prepare_group, group, slot, abandoned))
        return PendingBatch(groups, self.pixels[slot], functools.partial(self._slots.release, slot))

    def close(self) -> None:
        """Drop queued work, finish work in flight, and end threads and processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.processes is not None:
            self.processes.close()
        self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _prepare_group(self, images: dict[int, InputImage], slot: int, abandoned: Callable[[], bool]) -> list[Prepared]:
        """Prepare images, which have rows for keys."""
        if abandoned():
            raise CancelledError
        isolated = {} if self.processes is None else {row: im for row, im in images.items() if _has_decoder(im)}
        others = {row: image for row, image in images.items() if row not in isolated}
        prepared = _prepare_rows(self._timer, others, self._form, self._options, self.pixels[slot])
        if self.processes is not None and isolated:
            prepared |= self._prepare_isolated(isolated, slot, self.processes)
        return [replace(prepared[row], input=_drop_bytes(image)) for row, image in images.items()]

    def _prepare_isolated(self, images: dict[int, InputImage], slot: int, processes: WorkerPool) -> dict[int, Prepared]:
        """Prepare images in one process; if that fails, each image again alone."""
        # without what only the record needs
        sent = {row: InputImage(None, image.source, image.crop) for row, image in images.items()}
        try:
            return processes.call_timed(
                self._timer, _prepare_in_process, sent, self._form, self._options,
                cast(int, self._slots.descriptor), self.pixels.shape, slot,
            )  # fmt: skip
        except (WorkerCrashed, WorkerTimeout) as failure:
            if len(images) > 1:
                alone = (self._prepare_isolated({row: image}, slot, processes) for row, image in images.items())
                return functools.reduce(operator.or_, alone)
            if isinstance(failure, WorkerTimeout):
                limit = f"{self._options.decode_timeout:g} s; raise --decode-timeout"
                error = ImageError("decode_timeout", f"it was not decoded within {limit}")
            else:
                error = ImageError("decoder_crashed", f"its decoder {failure}, each of 2 times")
            return {row: Prepared(image, error=error) for row, image in images.items()}


def _prepare_rows(
    timer: StageTimer, images: dict[int, InputImage], form: InputForm, options: InferenceOptions, pixels: Pixels
) -> dict[int, Prepared]:
    """Prepare images into the rows of `pixels` that are their keys."""
    return {
        row: prepare(image, form, options, timer, pixels[row])
        for row, image in zip(images, read_remote(list(images.values())), strict=True)
    }


def _prepare_in_process(
    timer: StageTimer,
    images: dict[int, InputImage],
    form: InputForm,
    options: InferenceOptions,
    descriptor: int,
    shape: tuple[int, ...],
    slot: int,
) -> dict[int, Prepared]:
    """Prepare images in a worker process, which answers with neither their sources nor their pixels."""
    raise_pillow_limit(options.max_pixels)
    prepared = _prepare_rows(timer, images, form, options, _map_slots_once(descriptor, shape)[slot])
    # the caller knows them
    unnamed = InputImage(None, b"")
    return {row: replace(result, input=unnamed) for row, result in prepared.items()}


def group_size(rows: int, workers: int) -> int:
    """Return how many images of a batch of `rows` go to a worker at a time."""
    return max(1, min(MAX_GROUP, rows // min(workers, _SHARED_BY)))


def _drop_bytes(image: InputImage) -> InputImage:
    """Return a prepared image without a source in memory, of which a batch may have gigabytes."""
    in_memory = isinstance(image.source, bytes) or (image.frame is not None and isinstance(image.source, np.ndarray))
    return replace(image, source=b"") if in_memory else image


def _has_decoder(image: InputImage) -> bool:
    # pixels in memory have no decoder that could crash
    return image.error is None and not isinstance(image.source, Image.Image | np.ndarray)
