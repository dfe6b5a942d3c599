"""Batches of pixels in shared memory: numbered slots of numbered rows, which worker processes write into.

An image's pixels are written once, to where the session reads them: they pass through no pipe, and no batch is stacked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from opal_deploy.predict.types import Pixels, Prepared
from opal_deploy.workers.worker import create_shared_memory, map_shared_memory


@dataclass(frozen=True)
class SlotLayout:
    """How another process finds the slots: the memory's descriptor, and the shape (slots, rows, H0, W0, 3), uint8."""

    descriptor: int
    shape: tuple[int, int, int, int, int]

    def open(self) -> Pixels:
        """Return the slots: uint8 [slots, rows, H0, W0, 3]."""
        return np.frombuffer(map_shared_memory(self.descriptor, prod(self.shape)), np.uint8).reshape(self.shape)


class PixelSlots:
    """The slots of one decoder pool; every method may be called from any thread.

    `pixels` is uint8 [slots, rows, H0, W0, 3]; `layout` finds it in other processes, None if they do not share it.
    """

    def __init__(self, slots: int, rows: int, input_size: tuple[int, int], *, shared: bool) -> None:
        """Create `slots` slots of `rows` images, allocated on first use; raise MemoryError or StoppedEarly."""
        shape = (slots, rows, *input_size, 3)
        self.layout: SlotLayout | None = None
        if shared:
            self.layout = SlotLayout(create_shared_memory(prod(shape)), shape)
            self.pixels = self.layout.open()
        else:
            self.pixels = np.zeros(shape, np.uint8)
        # the last one used comes first: it is in the caches, and a short run touches few
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
        """Close the descriptor; the memory lives until its last user ends. May be called more than once."""
        if self.layout is not None:
            os.close(self.layout.descriptor)
        self.layout = None


@dataclass(frozen=True)
class PreparedBatch:
    """Images that are ready for a session.

    Attributes:
        images: everything but their pixels.
        pixels: uint8 [rows, H0, W0, 3] in a slot, with at least as many rows as images; zeros for an image with an
            error.
        release: gives the slot back.
    """

    images: tuple[Prepared, ...]
    pixels: Pixels
    release: Callable[[], None]
