"""Console output: messages on stderr, data on stdout, progress bars only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


def print_message(text: str = "") -> None:
    """Print lines for the user on stderr, fit for a terminal as by `one_line`; a closed pipe stops nothing."""
    try:
        print("\n".join(map(one_line, text.split("\n"))), file=sys.stderr, flush=True)
    except BrokenPipeError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # to the end of the process


def discard_message(line: str) -> None:
    """Print nothing: stands in for `print_message` in processes that do not print."""


def one_line(text: str) -> str:
    """Return text fit for one line of a terminal: characters that do not print are escaped, as in \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(document: Any) -> None:
    """Print a document as indented JSON on stdout."""
    print_json_line(json.dumps(document, indent=2, ensure_ascii=True))


def print_json_line(text: str) -> None:
    """Print a line on stdout; a closed pipe, as of `head`, stops nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # to the end of the process


class Advance(Protocol):
    """Moves a progress bar to `done` of `total`; `total` is None while it is unknown."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Show a progress bar on a terminal, and nothing in a log file."""
    if not sys.stderr.isatty():
        yield lambda done, total=None, note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, note="")

        def advance(done: int, total: int | None = None, note: str = "") -> None:
            if total is None:
                bar.update(task, completed=done, note=note)
            else:
                bar.update(task, completed=done, total=total, note=note)

        yield advance
