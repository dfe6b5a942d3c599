"""Callbacks of long jobs: one for lines of text, one for progress."""

from __future__ import annotations

import logging
from collections.abc import Callable

# receives one line of text
Log = Callable[[str], None]
# receives the number of images done, the number of all images (None while unknown), and a note on the current step
Progress = Callable[[int, int | None, str], None]

_WARNINGS = ("warning: ", "NOT VERIFIED")


def log_line(line: str) -> None:
    """Send a line to the logger `opal_deploy`: warnings at level WARNING, everything else at INFO.

    Unless a program configures logging, Python prints the former to stderr and drops the latter.
    """
    logging.getLogger("opal_deploy").log(logging.WARNING if line.startswith(_WARNINGS) else logging.INFO, "%s", line)


def no_progress(done: int, total: int | None, note: str) -> None:
    """Report nothing."""


def one_line(text: str) -> str:
    """Return text fit for one line of a terminal: characters that do not print are escaped, as in \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
