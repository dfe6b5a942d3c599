"""Callbacks of long jobs, for lines of text and for progress, and lines on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

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
    """Print lines on stderr, each escaped by `one_line`; a closed pipe is ignored."""
    try:
        print("\n".join(map(one_line, text.split("\n"))), file=sys.stderr, flush=True)
    except BrokenPipeError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # to the end of the process
