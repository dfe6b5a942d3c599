"""Lines of JSON and CSV that every reader splits alike, and the one reader of records.

Unicode, and with it `str.splitlines`, has more line breaks than newline, and file names may contain any of them. JSON
strings escape them; CSV has no escapes, so fields with one are quoted.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn, TextIO

import msgspec

from opal_deploy.records.record import Record, to_record

# line breaks of `str.splitlines` and of UAX #14
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# line breaks that JSON allows inside strings, and C1 control characters, which control terminals
_ESCAPED_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")
# a record is a few kilobytes; a damaged file may have no line ends at all
MAX_LINE_BYTES = 16 << 20


class Line(NamedTuple):
    """A line of results.jsonl.

    Attributes:
        size: bytes, with the newline.
        document: the document of JSON, with keys that this version does not know; None if the line is not one.
        record: the record in it; None if the line is not a whole one.
    """

    size: int
    document: Any
    record: Record | None


def read_lines(stream: BinaryIO) -> Iterator[Line]:
    """Yield the lines from a stream's position on."""
    while line := stream.readline(MAX_LINE_BYTES):
        document = parse_json(line) if line.endswith(b"\n") else None
        yield Line(len(line), document, parse_record(document))


def parse_record(document: Any) -> Record | None:
    """Return the record in a document of JSON; None if it is not a whole one."""
    try:
        return to_record(document)
    except ValueError:
        return None


def parse_json(data: bytes) -> Any:
    """Return a document of JSON; None if it is not one, or if a key occurs twice: readers differ in which they take."""
    try:
        return json.loads(data, object_pairs_hook=_build_object, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        raise ValueError("a key occurs twice")
    return built


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def to_document(record: Record) -> dict[str, Any]:
    """Return a record as plain values for JSON."""
    line = to_json_line(record)
    try:
        document: dict[str, Any] = msgspec.json.decode(line)
    except msgspec.DecodeError:
        # a lone surrogate
        document = json.loads(line)
    return document


def to_json_line(document: object) -> bytes:
    """Return a record or a document as one line of JSON in UTF-8, with a newline; numbers must be finite."""
    try:
        line = msgspec.json.encode(document)
    except UnicodeEncodeError:
        # a lone surrogate, written as \udcff
        text = json.dumps(msgspec.to_builtins(document), ensure_ascii=False, separators=(",", ":"))
        line = text.encode("utf-8", "backslashreplace")
    if not line.isascii() or b"\x7f" in line:
        line = _ESCAPED_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line.decode()).encode()
    return line + b"\n"


def csv_writer(stream: TextIO) -> Callable[[Sequence[object]], object]:
    """Return a function that writes a row of CSV to a stream opened with `newline=""`; None is an empty field.

    Rows end in a newline.
    """
    # before Python 3.13 the csv module quotes fields only for the characters of its line terminator
    return csv.writer(_LineEnds(stream), lineterminator=_LINE_BREAKS).writerow


class _LineEnds:
    """A stream that replaces `_LINE_BREAKS` at the end of a row by a newline."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix(_LINE_BREAKS) + "\n")
