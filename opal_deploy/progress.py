"""Progress of long calls: a bar on a terminal or in a notebook, lines in a log."""

from __future__ import annotations

import builtins
import datetime
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from opal_deploy.logs import one_line, print_message

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
        parts = [self._describe_count(done)]
        if seconds and counted:
            parts.append(_format_rate(counted / seconds))
            if self._total is not None:
                left = max(self._total - done, 0) * seconds / counted
                parts.append(f"{datetime.timedelta(seconds=round(left))} left")
        print_message(one_line(f"{self._title}: {', '.join(parts)}{f'; {note}' if note else ''}"))

    def _describe_count(self, done: int) -> str:
        return f"{done:,}" if not self._total else f"{done:,} of {self._total:,} ({done / self._total:.0%})"


def _format_rate(rate: float) -> str:
    return f"{rate:.0f}/s" if rate >= 100 else f"{rate:.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min"
