"""The one reader of results: results.jsonl, tables, URLs and records in memory, with the run.json next to them.

Damaged lines are reported; none is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import check_regular
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.options import StrPath
from opal_deploy.records.lines import MAX_LINE_BYTES, Line, parse_json, parse_record, read_lines
from opal_deploy.records.record import RECORD_SCHEMA, Record, to_record
from opal_deploy.records.run_files import RESULTS, RUN
from opal_deploy.records.tables import TABLES, read_table
from opal_deploy.remote import RemoteFile, is_url, redact

SUFFIX, SINGLE_SUFFIX = ".jsonl", ".json"
# results by path or URL, or records in memory, including `Model.predict`'s
AnyResults = StrPath | Sequence[Record | Mapping[str, Any]]


def is_results(path: Path) -> bool:
    """Return whether a path stands for results rather than a model."""
    return path.suffix in (SUFFIX, SINGLE_SUFFIX) or (path / RESULTS).is_file()


def find_results(path: Path) -> Path:
    """Return the results.jsonl of a path: the file itself, or the one in that folder; raise UsageError without one."""
    results = path / RESULTS if path.is_dir() else path
    try:
        check_regular(results)
    except OSError as error:
        found = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"{results}: {found}; expected results.jsonl of `opal-deploy infer`, or its folder") from None
    return results


def read_run_document(results: Path) -> dict[str, Any] | None:
    """Return the run.json next to a results.jsonl; None if there is none, or a damaged one."""
    path = results.parent / RUN
    try:
        document = parse_json(path.read_bytes()) if path.is_file() else None
    except OSError:
        return None
    return document if isinstance(document, dict) else None


def read_run_options(results: Path) -> dict[str, Any]:
    """Return the options in the run.json next to a results.jsonl; empty without one."""
    options = (read_run_document(results) or {}).get("run")
    return options if isinstance(options, dict) else {}


class Results:
    """Results that can be read more than once.

    Attributes:
        shown: the results as messages name them.
        path: the local file; None in a bucket and in memory.
    """

    def __init__(self, source: AnyResults) -> None:
        """Open results.jsonl, its folder or bucket, a table, or records in memory; UsageError if there are none."""
        self.path: Path | None = None
        self._source: Path | RemoteFile | Sequence[Record | Mapping[str, Any]]
        if not isinstance(source, str | os.PathLike):
            self.shown, self._source = "the records", source
            return
        text = os.fspath(source)
        self.shown = redact(text)
        if is_url(text):
            remote = RemoteFile.parse(text)
            self._source = remote if remote.name.endswith(SUFFIX) else remote.child(RESULTS)
        else:
            path = Path(text)
            self._source = self.path = path if _is_table(path) and path.is_file() else find_results(path)

    @property
    def in_memory(self) -> bool:
        """Whether a program passed the records instead of naming a file."""
        return not isinstance(self._source, Path | RemoteFile)

    def records(self) -> Iterator[Record]:
        """Yield all records; raise UsageError if the results cannot be read, or are damaged."""
        if isinstance(self._source, Path) and _is_table(self._source):
            yield from read_table(self._source)
        elif isinstance(self._source, Path | RemoteFile):
            for number, line in enumerate(self.lines(), 1):
                yield _require_record(self.path or self.shown, number, line)
        else:
            try:
                yield from map(to_record, self._source)
            except ValueError as error:
                raise UsageError(
                    f"{self.shown}: {error}; expected records of `Model.predict` or results.jsonl"
                ) from None

    def lines(self) -> Iterator[Line]:
        """Yield every line of a file, whether it is a record or not.

        A .json file is one record, on any number of lines: the answer that `serve` gave for an image.

        Raises:
            UsageError: the file cannot be read.
        """
        source = self._source
        assert isinstance(source, Path | RemoteFile)
        try:
            with source.open() if isinstance(source, RemoteFile) else source.open("rb") as stream:
                if isinstance(source, RemoteFile) or source.suffix != SINGLE_SUFFIX:
                    yield from read_lines(stream)
                    return
                document = parse_json(data := stream.read(MAX_LINE_BYTES))
        except ImageError as error:
            expected = f"; expected a finished run of `infer` with {RESULTS}" if error.code == "not_found" else ""
            raise UsageError(f"{self.shown}: cannot be read: {error}{expected}") from None
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror or error})") from None
        if isinstance(document, dict) and isinstance(document.get("record"), dict):
            # the answer for an image with an error
            document = document["record"]
        yield Line(len(data), document, parse_record(document))


class RecordIndex:
    """Records of a results.jsonl by image name; memory holds a name and an offset for each.

    Attributes:
        unnamed: number of records without a name.
    """

    def __init__(self, path: Path) -> None:
        """Read the file once; raise UsageError if it cannot be read, or a line is not a record."""
        results, offset = Results(path), 0
        self._offsets: dict[str, list[int]] = {}
        self.unnamed = 0
        for number, line in enumerate(results.lines(), 1):
            name = _require_record(path, number, line).image
            if name is None:
                self.unnamed += 1
            else:
                self._offsets.setdefault(name, []).append(offset)
            offset += line.size
        self._stream = path.open("rb")

    def count(self, name: str) -> int:
        """Return the number of records with a name."""
        return len(self._offsets.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        """Yield each name once, in the order of the file."""
        return iter(self._offsets)

    def __getitem__(self, name: str) -> list[Record]:
        """Return the records with a name, in input order; empty for an unknown name."""
        records = [self._read(offset) for offset in self._offsets.get(name, ())]
        # concatenated shards may be in another order
        return sorted(records, key=lambda record: -1 if record.image_index is None else record.image_index)

    def _read(self, offset: int) -> Record:
        self._stream.seek(offset)
        line = next(read_lines(self._stream), None)
        if line is None or line.record is None:
            raise UsageError(f"{self._stream.name}: changed while it was read; try again")
        return line.record

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _require_record(name: object, number: int, line: Line) -> Record:
    """Return a line's record; raise UsageError if it is not a record of this schema."""
    if line.record is not None:
        return line.record
    schema = line.document.get("schema", RECORD_SCHEMA) if isinstance(line.document, dict) else RECORD_SCHEMA
    if schema != RECORD_SCHEMA:
        raise UsageError(
            f"{name}: line {number}: record schema {schema!r} found, {RECORD_SCHEMA} expected; use the opal-deploy "
            "version that wrote it"
        )
    raise UsageError(f"{name}: line {number} is not a whole record of `opal-deploy infer`; the file is damaged")


def _is_table(path: Path) -> bool:
    return path.suffix.lstrip(".") in TABLES
