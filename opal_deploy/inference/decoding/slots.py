"""Batches of pixels in shared memory: numbered slots of numbered rows, which worker processes write into.

An image's pixels are written once, where the session reads them: they pass through no pipe, and no batch is stacked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from opal_deploy.inference.isolation.worker import create_shared_memory, map_shared_memory
from opal_deploy.inference.types import Pixels, Prepared


@dataclass(frozen=True)
class SlotLayout:
    """What another process needs in order to find the slots.

    Attributes:
        descriptor: of the shared memory.
        shape: (slots, rows, H0, W0, 3), uint8.
    """

    descriptor: int
    shape: tuple[int, int, int, int, int]

    def open(self) -> Pixels:
        """Return the slots: uint8 [slots, rows, H0, W0, 3]."""
        return np.frombuffer(map_shared_memory(self.descriptor, prod(self.shape)), np.uint8).reshape(self.shape)


class PixelSlots:
    """The slots of one decoder pool; every method may be called from any thread.

    Attributes:
        layout: for the processes that write into them; None where they are not shared.
        pixels: uint8 [slots, rows, H0, W0, 3].
    """

    def __init__(self, slots: int, rows: int, input_size: tuple[int, int], *, shared: bool) -> None:
        """Create `slots` slots of `rows` images each; memory is taken as they are used.

        Raises:
            MemoryError: there is no room for them. StoppedEarly: no memory can be shared.
        """
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
        """Take a free slot.

        Raises:
            IndexError: there is none.
        """
        with self._lock:
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back; nobody reads or writes it any more."""
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as somebody uses it. May be called more than once."""
        if self.layout is not None:
            os.close(self.layout.descriptor)
        self.layout = None


@dataclass(frozen=True)
class PreparedBatch:
    """Images that are ready for a session.

    Attributes:
        images: what is known of each, without its pixels.
        pixels: uint8 [rows, H0, W0, 3] in a slot, rows at least the number of images; zeros for an image with an error.
        release: gives the slot back.
    """

    images: tuple[Prepared, ...]
    pixels: Pixels
    release: Callable[[], None]
