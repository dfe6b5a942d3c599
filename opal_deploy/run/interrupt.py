"""Ctrl-C and SIGTERM: the first stops a run gracefully, the second ends the process at once."""

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
    """A request to end a run early; `stopped` is true if images were left because of it."""

    def __init__(self) -> None:
        # plain attributes: a signal may come while a lock is held
        self.requested = False
        self.stopped = False
        self._running = False

    def stop_when_requested(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items until the end is requested."""
        for item in items:
            if self.requested:
                self.stopped = True
                return
            yield item

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the block runs, take a first signal as a request; otherwise it is a KeyboardInterrupt."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def handle_signal(self, print_message: Callable[[str], None]) -> None:
        """Request the end of the run, or exit at a second signal; raise KeyboardInterrupt if no run is in progress."""
        if not self._running:
            raise KeyboardInterrupt
        if self.requested:
            # each record is written by one call, so the file has only whole lines
            print_message("Interrupted again: ending at once")
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # a progress bar hides the cursor
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True
        print_message("Interrupted: finishing the batches in flight (interrupt again to exit at once)")


@contextmanager
def handle_signals(print_message: Callable[[str], None]) -> Iterator[Interrupt]:
    """Send Ctrl-C and SIGTERM to an Interrupt while the block runs, then restore their handlers.

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
            # None: not installed by Python, so it cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
