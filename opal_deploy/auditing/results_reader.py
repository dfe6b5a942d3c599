"""Records that were written earlier, read without mercy: a damaged line is named, and nothing is passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from opal_deploy.errors import UsageError
from opal_deploy.inference.run.directory import RUN
from opal_deploy.inference.run.results import RESULTS, read_record
from opal_deploy.records.record import Record

SUFFIX = ".jsonl"
# as in `resume`: a damaged file may have no line ends at all
_LONGEST_LINE = 16 << 20


def is_results(path: Path) -> bool:
    """Whether a path is meant as records rather than as a model."""
    return path.suffix == SUFFIX or (path / RESULTS).is_file()


def results_file(path: Path) -> Path:
    """The file of records that a path means: itself, or the one in that folder.

    Raises:
        UsageError: there is none.
    """
    found = path / RESULTS if path.is_dir() else path
    if not found.is_file():
        raise UsageError(f"{found}: no such file; expected results.jsonl of `opal-deploy infer`, or its folder")
    return found


def options_of_run(results: Path) -> dict[str, Any]:
    """The options that a run noted beside its records; empty where nothing is known of it."""
    try:
        document = json.loads((results.parent / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    run = document.get("run") if isinstance(document, dict) else None
    return run if isinstance(run, dict) else {}


def all_records(path: Path) -> Iterator[Record]:
    """Every record of a file, one at a time.

    Raises:
        UsageError: unreadable, or a line that is no record.
    """
    for number, record in numbered_records(path):
        if record is None:
            raise UsageError(f"{path}: line {number} is not a whole record of `opal-deploy infer`; the file is damaged")
        yield record


def numbered_records(path: Path) -> Iterator[tuple[int, Record | None]]:
    """Line numbers, from 1, and their records; None for a line that is none.

    Raises:
        UsageError: unreadable.
    """
    try:
        with path.open("rb") as stream:
            for number, (_, line) in enumerate(_lines(stream), 1):
                yield number, read_record(line)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None


class RecordIndex:
    """Where in a file each image's record is: memory for a name and a number an image, whatever the records hold."""

    def __init__(self, path: Path) -> None:
        """Read the file once.

        Raises:
            UsageError: as `all_records`.
        """
        self._path = path
        self.offsets: dict[str, int] = {}
        self.repeated = 0
        self.unnamed = 0
        try:
            with path.open("rb") as stream:
                for number, (offset, line) in enumerate(_lines(stream), 1):
                    record = read_record(line)
                    if record is None:
                        raise UsageError(f"{path}: line {number} is not a whole record; the file is damaged")
                    self._add(record["image"], offset)
            self._stream = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None

    def _add(self, name: str | None, offset: int) -> None:
        if name is None:
            self.unnamed += 1
        elif name in self.offsets:
            self.repeated += 1
        else:
            self.offsets[name] = offset

    def __getitem__(self, name: str) -> Record:
        self._stream.seek(self.offsets[name])
        record = read_record(self._stream.readline(_LONGEST_LINE))
        if record is None:
            raise UsageError(f"{self._path}: it changed while it was read; try again")
        return record

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while line := stream.readline(_LONGEST_LINE):
        yield offset, line
        offset += len(line)
