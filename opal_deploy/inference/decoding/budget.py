"""Bounds of pixels: of one image for Pillow, and of the large images that are decoded at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image


def raise_pillow_limit(max_pixels: int) -> None:
    """Let Pillow decode images of up to `max_pixels`, in this process and in those that decode for it."""
    # Pillow refuses twice its own limit before `max_pixels` is checked
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)


class PixelBudget:
    """A number of pixels that may be decoded at a time; an image with more takes all of it, and is decoded alone."""

    def __init__(self, pixels: int) -> None:
        """Start with all `pixels` free."""
        self._total = self._free = pixels
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that claims pixels, once they are free and those who waited before have theirs.

        A second claim replaces the first, and one of 0 pixels frees it; so does leaving the block.
        """
        held = 0

        def claim(pixels: int) -> None:
            nonlocal held
            self.release(held)
            # or those who wait would wait for what this one no longer holds
            held = 0
            held = self.acquire(pixels) if pixels > 0 else 0

        try:
            yield claim
        finally:
            self.release(held)

    def acquire(self, pixels: int) -> int:
        """Take pixels once they are free, and return their number: all there are where that is less."""
        pixels, ticket = min(pixels, self._total), object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and pixels <= self._free)
            self._waiting.popleft()
            self._free -= pixels
            self._changed.notify_all()
        return pixels

    def release(self, pixels: int) -> None:
        """Give back what `acquire` returned; any thread may do it."""
        with self._changed:
            self._free += pixels
            self._changed.notify_all()
