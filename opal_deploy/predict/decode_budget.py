"""Limits that several decoders share: the largest image for Pillow, and the pixels that are decoded at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image


def raise_pillow_limit(max_pixels: int) -> None:
    """Let Pillow decode images of up to `max_pixels`, in this process and its decode processes."""
    # Pillow refuses twice its own limit before `max_pixels` is checked
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)


class FairSemaphore:
    """A counter whose units are granted in the order of the requests; a request for more than all units gets all."""

    def __init__(self, units: int) -> None:
        """Start with all `units` free."""
        self._total = self._free = units
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def is_contended(self) -> bool:
        """Whether a thread waits for units."""
        return bool(self._waiting)

    def acquire(self, units: int) -> int:
        """Wait for units, and return how many were granted."""
        units, ticket = min(units, self._total), object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and units <= self._free)
            self._waiting.popleft()
            self._free -= units
            self._changed.notify_all()
        return units

    def release(self, units: int) -> None:
        """Give back what `acquire` granted, from any thread."""
        with self._changed:
            self._free += units
            self._changed.notify_all()

    @contextmanager
    def lease(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that claims units; a later claim replaces the first, 0 or the end of the block frees it."""
        held = 0

        def claim(units: int) -> None:
            nonlocal held
            # released first: otherwise those ahead in the queue could wait for these units for ever
            self.release(held)
            held = 0
            held = self.acquire(units) if units > 0 else 0

        try:
            yield claim
        finally:
            self.release(held)
