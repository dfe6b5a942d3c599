"""The callbacks of a long job: lines of text and progress. By default lines go to the logger `opal_deploy`."""

from __future__ import annotations

import logging
from collections.abc import Callable

# receives one line for a person
Log = Callable[[str], None]
# receives the number of items done, the number of all items where it is known, and a note on what is being done
Progress = Callable[[int, int | None, str], None]

_WARNINGS = ("warning: ", "NOT VERIFIED")


def log_line(line: str) -> None:
    """Send a line to the logger `opal_deploy`, a warning at level WARNING, all else at INFO.

    Python shows the former on stderr and drops the latter, unless a program sets its logging up.
    """
    logging.getLogger("opal_deploy").log(logging.WARNING if line.startswith(_WARNINGS) else logging.INFO, "%s", line)


def no_log(line: str) -> None:
    """Drop the line."""


def no_progress(done: int, total: int | None, note: str) -> None:
    """Report nothing."""


def one_line(text: str) -> str:
    """Return text fit for one line of a terminal: characters that do not print are escaped, as in \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
