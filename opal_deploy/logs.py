"""Callbacks of long jobs, for lines of text and for progress: a bar on a terminal or in a notebook, lines in a log."""

from __future__ import annotations

import builtins
import datetime
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

# receives one line of text
Log = Callable[[str], None]
# receives the number of images done, the number of all images (None while unknown), and a note on the current step
Progress = Callable[[int, int | None, str], None]


# of a call from Python: True shows a bar
ProgressChoice = Progress | bool


class WarningLine(str):
    """A line of text that is a warning, for a `Log`."""

    __slots__ = ()


def log_line(line: str) -> None:
    """Send a line to the logger `opal_deploy`: a `WarningLine` at level WARNING, any other at INFO.

    Unless a program configures logging, Python prints the former to stderr and drops the latter.
    """
    logging.getLogger("opal_deploy").log(logging.WARNING if isinstance(line, WarningLine) else logging.INFO, "%s", line)


def no_progress(done: int, total: int | None, note: str) -> None:
    """Report nothing."""


def as_progress(choice: ProgressChoice | None) -> Progress:
    """Return the function to report to; `True` is replaced by one before (`options.keywords`)."""
    return choice if callable(choice) else no_progress


def one_line(text: str) -> str:
    """Return text fit for one line of a terminal: characters that do not print are escaped, as in \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_message(text: str = "") -> None:
    """Print lines on stderr, each escaped by `one_line`; a closed pipe or a full device is ignored."""
    try:
        print("\n".join(map(one_line, text.split("\n"))), file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # to the end of the process


# seconds between two lines of progress in a log, and between two drawings of a bar
_LINE_SECONDS, _BAR_SECONDS = 30.0, 0.1


class Advance(Protocol):
    """Reports that `done` of `total` steps are done; `total` is None while it is unknown."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


@contextmanager
def show_progress(title: str) -> Iterator[Advance]:
    """Show a progress bar on a terminal or in a notebook; elsewhere print a line every half a minute.

    Draws only in calls of `Advance`, so that no thread disturbs measurements.
    """
    # IPython defines it for the session
    in_notebook = type(getattr(builtins, "get_ipython", lambda: None)()).__name__ == "ZMQInteractiveShell"
    if not (sys.stderr.isatty() or in_notebook):
        yield ProgressLines(title)
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.text import Text

    class RateColumn(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text("" if rate is None else _format_rate(rate))

    bar = rich.Progress(
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), RateColumn(),
        rich.TimeRemainingColumn(), rich.TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True), auto_refresh=False,
    )  # fmt: skip
    task = bar.add_task(title, total=None, note="")
    drawn = time.monotonic()

    def advance(done: int, total: int | None = None, note: str = "") -> None:
        nonlocal drawn
        is_first_total = total is not None and bar.tasks[0].total is None
        bar.update(task, completed=done, total=total, note=one_line(note))
        # from the first call on
        bar.start()
        if (now := time.monotonic()) - drawn >= _BAR_SECONDS or is_first_total:
            drawn = now
            bar.refresh()

    try:
        yield advance
    finally:
        bar.stop()


class ProgressLines:
    """Progress for a log: `images: 1,234 of 5,678 (22 %), 41.2/s, 0:01:48 left`, and a note."""

    def __init__(self, title: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start to count; the first line comes after half a minute."""
        self._title, self._clock = title, clock
        self._printed = clock()
        self._total: int | None = None
        # time and count since the last line; a resumed run does not start at 0
        self._since: tuple[float, int] | None = None

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Print a line if the last one is half a minute old; see `Advance`."""
        now = self._clock()
        # another total: another task under the same title
        is_next_task = self._total is not None and total is not None and total != self._total
        if self._since is None or is_next_task or done < self._since[1]:
            self._since = now, done
        self._total = total or self._total
        if now - self._printed < _LINE_SECONDS:
            return
        self._printed = now
        seconds, counted = now - self._since[0], done - self._since[1]
        # the rate is that since the last line
        self._since = now, done
        parts = [f"{done:,} of {self._total:,} ({done / self._total:.0%})" if self._total else f"{done:,}"]
        if seconds and counted:
            parts.append(_format_rate(counted / seconds))
            if self._total is not None:
                left = max(self._total - done, 0) * seconds / counted
                parts.append(f"{datetime.timedelta(seconds=round(left))} left")
        print_message(one_line(f"{self._title}: {', '.join(parts)}{f'; {note}' if note else ''}"))


def _format_rate(rate: float) -> str:
    return f"{rate:.0f}/s" if rate >= 100 else f"{rate:.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min"
