"""Ctrl-C and SIGTERM: the first ends a run in good order, the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
INTERRUPTED = 130


class Interrupt:
    """Whether somebody wants a run to end, and whether it ended because of that.

    Attributes:
        requested: no more images are to be taken.
        stopped: images were left because of it.
    """

    def __init__(self) -> None:
        # plain attributes: a signal may come while a lock is held
        self.requested = False
        self.stopped = False
        self._running = False

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, which end once the end is requested."""
        iterator = iter(items)
        while not self.requested:
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item
        self.stopped = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the block runs, a first signal is a request; before and after it is a KeyboardInterrupt."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def signalled(self, say: Callable[[str], None]) -> None:
        """What a handler does.

        Raises:
            KeyboardInterrupt: nothing is being written that would have to be ended in good order.
        """
        if not self._running:
            raise KeyboardInterrupt
        if self.requested:
            # records are written by one call each, so they are whole lines now too
            say("Interrupted again: ending at once")
            if sys.stderr.isatty():
                say("\x1b[?25h")  # a progress bar hides the cursor
            os._exit(INTERRUPTED)
        self.requested = True
        say("Interrupted: the batches in work are finished first (again: end at once)")


@contextmanager
def signals(say: Callable[[str], None]) -> Iterator[Interrupt]:
    """Ctrl-C and SIGTERM go to the Interrupt while the block runs; afterwards they do what they did before.

    Outside the main thread, where Python allows no handlers, nothing is installed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt.signalled(say)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            # None: installed by something else than Python, which cannot be put back from here
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
