"""Ctrl-C and SIGTERM: the first ends a run in good order, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from opal_deploy.errors import ExitCode

T = TypeVar("T")


class Interrupt:
    """A request to end a run early.

    Attributes:
        requested: no more images are taken.
        stopped: images were left because of the request.
    """

    def __init__(self) -> None:
        # plain attributes: a signal may come while a lock is held
        self.requested = False
        self.stopped = False
        self._running = False

    def stop_when_requested(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items until the end is requested."""
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
        """Take a first signal as a request while the block runs; before and after, it is a KeyboardInterrupt."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def handle_signal(self, print_message: Callable[[str], None]) -> None:
        """Request the end of the run; at a second signal exit at once.

        Raises:
            KeyboardInterrupt: no run is in work that would have to be ended in good order.
        """
        if not self._running:
            raise KeyboardInterrupt
        if self.requested:
            # records are written by one call each, so they are whole lines now too
            print_message("Interrupted again: ending at once")
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # a progress bar hides the cursor
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True
        print_message("Interrupted: the batches in work are finished first (again: end at once)")


@contextmanager
def handle_signals(print_message: Callable[[str], None]) -> Iterator[Interrupt]:
    """Send Ctrl-C and SIGTERM to an Interrupt while the block runs; afterwards they do what they did before.

    Outside the main thread, where Python allows no handlers, nothing is installed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt.handle_signal(print_message)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            # None: installed by something else than Python, which cannot be put back from here
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
