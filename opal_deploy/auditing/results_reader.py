"""Strict reading of results.jsonl: a damaged line is named, and nothing is passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from opal_deploy.errors import UsageError
from opal_deploy.inference.run.results import parse_record
from opal_deploy.inference.run_files import RESULTS, RUN
from opal_deploy.records.record import Record

SUFFIX = ".jsonl"
# a damaged file may have no line ends at all
_MAX_LINE = 16 << 20


def is_results(path: Path) -> bool:
    """Return whether a path is meant as records rather than as a model."""
    return path.suffix == SUFFIX or (path / RESULTS).is_file()


def find_results(path: Path) -> Path:
    """Return the file of records that a path means: the file itself, or the one in that folder.

    Raises:
        UsageError: there is none.
    """
    results = path / RESULTS if path.is_dir() else path
    if not results.is_file():
        raise UsageError(f"{results}: no such file; expected results.jsonl of `opal-deploy infer`, or its folder")
    return results


def read_run_options(results: Path) -> dict[str, Any]:
    """Return the options in the run.json beside a file of records; empty where there is none."""
    try:
        document = json.loads((results.parent / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    options = document.get("run") if isinstance(document, dict) else None
    return options if isinstance(options, dict) else {}


def read_all_records(path: Path) -> Iterator[Record]:
    """Yield every record of a file.

    Raises:
        UsageError: the file cannot be read, or a line is no record.
    """
    for line_number, record in read_numbered_records(path):
        if record is None:
            raise UsageError(
                f"{path}: line {line_number} is not a whole record of `opal-deploy infer`; the file is damaged"
            )
        yield record


def read_numbered_records(path: Path) -> Iterator[tuple[int, Record | None]]:
    """Yield line numbers, from 1, and their records; None for a line that is no record.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            for line_number, (_, line) in enumerate(_read_lines(stream), 1):
                yield line_number, parse_record(line)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None


class RecordIndex:
    """Records of a file by their images' names; in memory are a name and an offset for each.

    Attributes:
        unnamed: number of records without an image's name.
    """

    def __init__(self, path: Path) -> None:
        """Read the file once.

        Raises:
            UsageError: the file cannot be read, or a line is no record.
        """
        self._path = path
        # of each name's first record, and of the later ones of names that several images have
        self._offsets: dict[str, int] = {}
        self._later_offsets: dict[str, list[int]] = {}
        self.unnamed = 0
        try:
            with path.open("rb") as stream:
                for line_number, (offset, line) in enumerate(_read_lines(stream), 1):
                    record = parse_record(line)
                    if record is None:
                        raise UsageError(f"{path}: line {line_number} is not a whole record; the file is damaged")
                    self._add(record["image"], offset)
            self._stream = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None

    def _add(self, name: str | None, offset: int) -> None:
        if name is None:
            self.unnamed += 1
        elif name in self._offsets:
            self._later_offsets.setdefault(name, []).append(offset)
        else:
            self._offsets[name] = offset

    def count(self, name: str) -> int:
        """Return the number of records of a name."""
        return (name in self._offsets) + len(self._later_offsets.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        """Yield each name once, in the order of the file."""
        return iter(self._offsets)

    def __getitem__(self, name: str) -> list[Record]:
        """Return the records of a name in the order of their images among the inputs; none for another name."""
        offsets = [self._offsets[name], *self._later_offsets.get(name, ())] if name in self._offsets else []
        # shards put together may be in another order; records without an index are in that of the file
        return sorted(map(self._read, offsets), key=lambda record: record.get("image_index", -1))

    def _read(self, offset: int) -> Record:
        self._stream.seek(offset)
        record = parse_record(self._stream.readline(_MAX_LINE))
        if record is None:
            raise UsageError(f"{self._path}: it changed while it was read; try again")
        return record

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while line := stream.readline(_MAX_LINE):
        yield offset, line
        offset += len(line)
