"""How the CLI talks: people on stderr, machines on stdout, progress bars only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


def say(text: str = "") -> None:
    """A line for a person."""
    print(text, file=sys.stderr, flush=True)


def emit_json(document: Any) -> None:
    """A document for a machine, on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=True), flush=True)


class Advance(Protocol):
    """Moves a progress bar to `done` of `total`; `total` None where it is not known yet."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """A progress bar on a terminal; nothing in a log file."""
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
