"""Memory of the batches in flight on an NVIDIA GPU, on the device and page-locked on the host."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, tensor_specs
from opal_deploy.errors import StoppedEarly
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.cuda import Cuda, Event, Stream


@dataclass(eq=False)
class BufferSet:
    """The memory of one batch in flight.

    Attributes:
        number: unique within a session.
        rows: images that the buffers have room for.
        device: addresses on the device, by tensor.
        host: page-locked arrays, by tensor.
        copied: event after which the images are on the device.
        done: event after which the outputs are on the host.
        images: images in flight.
        source: the images, where they are copied from the caller's memory.
    """

    number: int
    rows: int
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

    def reserve(self, capacity: int, count: int) -> None:
        """Allocate `count` sets for parts of `capacity` images; OutOfMemory where there is no room."""
        sets = self._sets.setdefault(capacity, [])
        while len(sets) < count:
            sets.append(self._allocate(capacity))

    def take(self, capacity: int, in_flight: Collection[BufferSet]) -> BufferSet:
        """Return a set of this capacity that is not in flight, allocated if there is none."""
        sets = self._sets.setdefault(capacity, [])
        # in turn, so that the copies of a part never wait for the kernels of the last one
        free = next((each for each in sets if each not in in_flight), None)
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
        buffers = BufferSet(next(self._numbers), capacity, {}, {}, *events)
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
