"""Batches in flight on an NVIDIA GPU: buffers on host and device, and two streams.

One stream copies images to the device, the other runs the kernels and copies their outputs back, so that the next
images arrive while a batch is computed. `Kernels` stands for an engine or ONNX Runtime. Host buffers are page-locked;
images in memory that the caller registered are copied from there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, FloatArray, Outputs, tensor_specs
from opal_deploy.errors import OutOfMemory, StoppedEarly
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.cuda import Cuda, Event, Stream
from opal_deploy.runtime.session import ImageBatch, check_batch

# batches in flight: one computed, one copied or waiting, and one in case the host is late
DEPTH = 3


@dataclass(eq=False)
class BufferSet:
    """The memory of one batch in flight.

    Attributes:
        number: unique within a session.
        device: addresses on the device, by tensor.
        host: page-locked arrays, by tensor.
        copied: event after which the images are on the device.
        done: event after which the outputs are on the host.
        images: images in flight.
        source: the images, where they are copied from the caller's memory.
    """

    number: int
    device: dict[str, int]
    host: dict[str, NDArray[Any]]
    copied: Event
    done: Event
    images: int = 0
    source: NDArray[Any] | None = None


class BufferPool:
    """The sets of buffers of a session, and the memory that its callers registered.

    The calling thread's device is the pool's, see `Cuda.activated`. Memory is registered and unregistered by any
    thread; everything else is called by one at a time.
    """

    def __init__(self, cuda: Cuda, metadata: Metadata, copy_stream: Stream) -> None:
        """Make a pool without buffers for a model; images are copied to the device on `copy_stream`."""
        self._cuda, self._metadata, self._copy_stream = cuda, metadata, copy_stream
        self._specs = tensor_specs(metadata)
        # by capacity
        self._sets: dict[int, list[BufferSet]] = {}
        self._numbers = itertools.count()
        # address and size of what callers registered, and whether it was locked here
        self._registered: dict[int, tuple[int, bool]] = {}
        self._registered_lock = threading.Lock()

    def reserve(self, capacity: int) -> None:
        """Allocate all sets for parts of `capacity` images, so that a lack of memory (OutOfMemory) shows now."""
        sets = self._sets.setdefault(capacity, [])
        while len(sets) < DEPTH:
            sets.append(self._allocate(capacity))

    def take(self, capacity: int, in_flight: Collection[BufferSet]) -> BufferSet:
        """Return a set of this capacity that is not in flight, allocated if there is none."""
        sets = self._sets.setdefault(capacity, [])
        # in turn, so that the copies of a part never wait for the kernels of the last one
        free = next((buffers for buffers in sets if buffers not in in_flight), None)
        if free is None:
            free = self._allocate(capacity)
        else:
            sets.remove(free)
        sets.append(free)
        return free

    def fill(self, buffers: BufferSet, images: NDArray[Any]) -> NDArray[Any]:
        """Return page-locked memory that holds the images: their own, or the buffer's."""
        buffers.images, buffers.source = len(images), None
        pinned = buffers.host[INPUT][: len(images)]
        if self._is_registered(images, pinned.dtype):
            buffers.source = images
            return images
        if images.dtype == np.uint8 and self._metadata.input_kind == "float32":
            pinned[:] = normalise(images, self._metadata.mean, self._metadata.std)
        else:
            pinned[:] = images
        return pinned

    def _is_registered(self, images: NDArray[Any], dtype: np.dtype[Any]) -> bool:
        if not self._registered or images.dtype != dtype or not images.flags.c_contiguous:
            return False
        start = images.ctypes.data
        # another thread may register its own memory now
        with self._registered_lock:
            return any(
                address <= start and start + images.nbytes <= address + size
                for address, (size, _) in self._registered.items()
            )

    def free(self) -> None:
        """Free all sets."""
        for buffers in itertools.chain.from_iterable(self._sets.values()):
            self._free(buffers)
        self._sets = {}

    def register(self, address: int, size: int) -> None:
        """Page-lock memory of a caller, from where `fill` lets images be copied; StoppedEarly where it cannot be."""
        with self._registered_lock:
            self._registered[address] = size, self._cuda.register(address, size)

    def unregister(self, address: int) -> None:
        """Unlock memory of `register` after the copies from it."""
        with self._registered_lock:
            _, locked_here = self._registered.pop(address, (0, False))
        if locked_here:
            with contextlib.suppress(StoppedEarly):
                self._cuda.synchronize_stream(self._copy_stream)
            self._cuda.unregister(address)

    def unregister_all(self) -> None:
        """Unlock all memory of `register`."""
        for address in tuple(self._registered):
            self.unregister(address)

    def _allocate(self, capacity: int) -> BufferSet:
        events = self._cuda.create_event(), self._cuda.create_event()
        buffers = BufferSet(next(self._numbers), {}, {}, *events)
        try:
            for name, (shape, dtype) in self._specs.items():
                buffers.host[name] = self._cuda.allocate_pinned((capacity, *shape), dtype)
                buffers.device[name] = self._cuda.allocate(buffers.host[name].nbytes)
            # rows that no image fills yet are computed, too
            self._cuda.clear(buffers.device[INPUT], buffers.host[INPUT].nbytes, self._copy_stream)
        except StoppedEarly:
            self._free(buffers)
            raise
        return buffers

    def _free(self, buffers: BufferSet) -> None:
        for address in buffers.device.values():
            self._cuda.free(address)
        for array in buffers.host.values():
            self._cuda.free_pinned(array)
        self._cuda.destroy(events=(buffers.copied, buffers.done))


class Kernels(Protocol):
    """The computation of a batch whose images are on the device."""

    @property
    def max_rows(self) -> int:
        """The most images that one execution takes; larger batches are taken in parts."""

    def rows(self, images: int) -> int:
        """Return the number of images to execute for a part of `images`; the outputs of the others are dropped."""

    def capacity(self, rows: int) -> int:
        """Return the number of images that the buffers for a part of `rows` have room for."""

    def enqueue(self, buffers: BufferSet, rows: int, stream: Stream) -> None:
        """Queue the computation of the first `rows` images of a set of buffers.

        Raises:
            StoppedEarly: it failed. OutOfMemory: the device's memory is full.
        """

    def release_memory(self) -> None:
        """Free memory that executions can allocate again, after memory ran out; nothing is queued any more."""

    def close(self) -> None:
        """Free everything that belongs to sets of buffers, before these are freed."""


@dataclass(eq=False)
class PendingBatch:
    """A batch in flight: for each of its parts the outputs, or None until they were waited for."""

    parts: list[Outputs | None] = field(default_factory=list)


@dataclass(frozen=True)
class _RunningPart:
    """A part on the device; its batch may have been dropped by the caller meanwhile."""

    batch: weakref.ref[PendingBatch]
    index: int
    buffers: BufferSet


class PipelineSession:
    """The part of a GPU session that does not depend on the engine.

    Batches come from one thread at a time; buffers are registered from any. A subclass calls `_start_pipeline` when the
    model is loaded.
    """

    metadata: Metadata
    depth = DEPTH
    # until the pipeline is started, and again after `close`
    _closed = True

    def _start_pipeline(self, cuda: Cuda, kernels: Kernels, stream: Stream) -> None:
        """Make the session ready for batches; `close` closes the kernels and destroys their stream."""
        self._cuda, self._kernels = cuda, kernels
        self._copy_stream, self._compute_stream = cuda.create_stream(), stream
        self._buffers = BufferPool(cuda, self.metadata, self._copy_stream)
        self._pending: deque[weakref.ref[PendingBatch]] = deque()
        self._running: deque[_RunningPart] = deque()
        self._closed = False

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        check_batch(images, self.metadata)
        return self._run_batch(images)

    def submit(self, images: ImageBatch) -> PendingBatch:
        """See `PipelinedSession.submit`; a batch that takes several executions waits for its first parts."""
        check_batch(images, self.metadata)
        return self._submit(images)

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Run float32 [N, 3, H0, W0], already normalised; only for a model whose input is float32."""
        return self._run_batch(images)

    def _submit(self, images: NDArray[Any]) -> PendingBatch:
        """Begin a batch of N images in the model's input layout, or uint8 [N, H0, W0, 3] for any model.

        A batch that takes several executions waits for room while others are in flight.

        Raises:
            StoppedEarly: the kernels or the device failed. OutOfMemory: memory is full.
            ValueError: `DEPTH` batches are in flight.
        """
        self._check_open()
        self._forget_dropped()
        if len(self._pending) >= DEPTH:
            raise ValueError(f"{DEPTH} batches are in flight; collect one first")
        batch = PendingBatch()
        with self._cuda.activated(), self._drop_on_failure(batch):
            for start in range(0, len(images), self._kernels.max_rows):
                part = images[start : start + self._kernels.max_rows]
                if len(self._running) == DEPTH:
                    self._finish_oldest()
                rows = self._kernels.rows(len(part))
                in_flight = [running.buffers for running in self._running]
                buffers = self._buffers.take(self._kernels.capacity(rows), in_flight)
                self._start_part(buffers, part, rows)
                self._running.append(_RunningPart(weakref.ref(batch), len(batch.parts), buffers))
                batch.parts.append(None)
        self._pending.append(weakref.ref(batch))
        return batch

    def collect(self, handle: object) -> Outputs:
        """See `PipelinedSession.collect`."""
        self._check_open()
        self._forget_dropped()
        batch = self._pending[0]() if self._pending else None
        if batch is None or batch is not handle:
            raise ValueError("batches are collected once, in the order in which they were submitted")
        self._pending.popleft()
        with self._cuda.activated(), self._drop_on_failure(batch):
            while None in batch.parts:
                self._finish_oldest()
        parts = [part for part in batch.parts if part is not None]
        return parts[0] if len(parts) == 1 else Outputs.concatenate(parts)

    def _run_batch(self, images: NDArray[Any]) -> Outputs:
        """Return the outputs for N images; see `_submit`."""
        self._check_idle()
        return self.collect(self._submit(images))

    def register_buffer(self, address: int, size: int) -> bool:
        """See `PinningSession.register_buffer`."""
        self._check_open()
        try:
            with self._cuda.activated():
                self._buffers.register(address, size)
        except StoppedEarly:  # only slower: batches from there go through a buffer of ours
            return False
        return True

    def unregister_buffer(self, address: int) -> None:
        """See `PinningSession.unregister_buffer`."""
        self._check_open()
        with self._cuda.activated():
            self._buffers.unregister(address)

    def close(self) -> None:
        """Free device and page-locked memory, streams and events."""
        if self._closed:
            return
        with self._cuda.activated():
            self._synchronize()
            self._buffers.unregister_all()
            self._closed = True
            self._kernels.close()
            self._buffers.free()
            self._cuda.destroy(streams=(self._copy_stream, self._compute_stream))
        self._running.clear()
        self._pending.clear()

    def __del__(self) -> None:
        # at the interpreter's end the libraries may be gone already, and the memory with them
        with contextlib.suppress(Exception):
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the session is closed")

    def _check_idle(self) -> None:
        self._check_open()
        self._forget_dropped()
        if self._pending:
            raise ValueError("batches are in flight; collect them first")
        with self._cuda.activated():
            while self._running:  # of batches that were dropped
                self._finish_oldest()

    def _forget_dropped(self) -> None:
        """Forget batches whose handles are gone, such as those of a run that was interrupted."""
        self._pending = deque(batch for batch in self._pending if batch() is not None)

    @contextlib.contextmanager
    def _drop_on_failure(self, batch: PendingBatch) -> Iterator[None]:
        """Stop all use of the buffers by a failed batch, and forget its parts; make room if memory is full."""
        try:
            yield
        except BaseException as error:
            self._synchronize()
            self._running = deque(part for part in self._running if part.batch() is not batch)
            if isinstance(error, OutOfMemory):
                self._release_memory()
            raise

    def _release_memory(self) -> None:
        """Free all buffers, and memory that the kernels can allocate again, to make room for a smaller batch.

        The outputs of other batches in flight are taken from their buffers first.
        """
        try:
            while self._running:
                self._finish_oldest()
        except StoppedEarly:  # the device is lost, which collecting these batches will report
            return
        self._kernels.release_memory()
        self._buffers.free()

    def _synchronize(self) -> None:
        for stream in (self._copy_stream, self._compute_stream):
            with contextlib.suppress(StoppedEarly):
                self._cuda.synchronize_stream(stream)

    def _finish_oldest(self) -> None:
        part = self._running[0]
        outputs, batch = self._wait(part.buffers), part.batch()
        self._running.popleft()
        if batch is not None:
            batch.parts[part.index] = outputs

    def _start_part(self, buffers: BufferSet, images: NDArray[Any], rows: int) -> None:
        """Queue copies and kernels of one part, executed as `rows` images."""
        self._cuda.copy_to_device(buffers.device[INPUT], self._buffers.fill(buffers, images), self._copy_stream)
        self._cuda.record(buffers.copied, self._copy_stream)
        self._cuda.wait_for_event(self._compute_stream, buffers.copied)
        self._kernels.enqueue(buffers, rows, self._compute_stream)
        for name in self.metadata.outputs:
            host = buffers.host[name][: buffers.images]
            self._cuda.copy_to_host(host, buffers.device[name], self._compute_stream)
        self._cuda.record(buffers.done, self._compute_stream)

    def _wait(self, buffers: BufferSet) -> Outputs:
        self._cuda.synchronize_event(buffers.done)
        buffers.source = None
        # copies, since the buffers are used again
        outputs = {name: buffers.host[name][: buffers.images].copy() for name in self.metadata.outputs}
        return Outputs.from_arrays(outputs)
