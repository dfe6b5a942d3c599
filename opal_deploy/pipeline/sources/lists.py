"""Lists of paths, one a line, on standard input or in a file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from opal_deploy.errors import UsageError


def stdin_lines(stdin: TextIO | None) -> Iterator[str]:
    """Paths on standard input.

    Raises:
        UsageError: there is none.
    """
    if stdin is None:
        raise UsageError("-: there is no standard input to read paths from")
    if isinstance(stdin, io.TextIOWrapper):
        # names are bytes; one that is not UTF-8 names a file all the same
        stdin.reconfigure(errors="surrogateescape")
    yield from _names(stdin)


def file_lines(path: Path) -> Iterator[str]:
    """Paths in a text file, UTF-8; relative ones are meant from the working directory, as on standard input.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
            yield from _names(stream)
    except OSError as error:
        raise UsageError(
            f"@{path}: the list cannot be read ({error.strerror or error}); expected a text file with a path a line"
        ) from None


def _names(stream: TextIO) -> Iterator[str]:
    for line in stream:
        name = line.rstrip("\n")
        if name:
            yield name
