"""Lines that a long job reports; by default they go to the logger `opal_deploy` of Python's `logging`."""

from __future__ import annotations

import logging
from collections.abc import Callable

# receives one line for a person
Log = Callable[[str], None]

_WARNINGS = ("warning: ", "NOT VERIFIED")


def log_line(line: str) -> None:
    """Send a line to the logger `opal_deploy`, a warning at level WARNING, all else at INFO.

    Python shows the former on stderr and drops the latter, unless a program sets its logging up.
    """
    logging.getLogger("opal_deploy").log(logging.WARNING if line.startswith(_WARNINGS) else logging.INFO, "%s", line)
