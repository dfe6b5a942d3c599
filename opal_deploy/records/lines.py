"""Lines of JSON and CSV that every reader splits alike.

Unicode, and with it `str.splitlines`, has more line breaks than newline, and file names may contain any of them. JSON
strings escape them; CSV has no escapes, so fields with one are quoted.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

import orjson

# line breaks of `str.splitlines` and of UAX #14
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# line breaks that JSON allows inside strings, and C1 control characters, which control terminals
_ESCAPED_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")


def to_json_line(document: object) -> bytes:
    """Return a document as one line of JSON in UTF-8, with a newline; numbers must be finite."""
    try:
        line = orjson.dumps(document)
    except orjson.JSONEncodeError:
        # a lone surrogate, written as \udcff
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        line = text.encode("utf-8", "backslashreplace")
    if not line.isascii() or b"\x7f" in line:
        line = _ESCAPED_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line.decode()).encode()
    return line + b"\n"


def write_csv(stream: TextIO, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows of CSV that end in a newline to a stream opened with `newline=""`; None is an empty field."""
    # before Python 3.13 the csv module quotes fields only for the characters of its line terminator
    writer = csv.writer(_LineEnds(stream), lineterminator=_LINE_BREAKS)
    writer.writerow(header)
    writer.writerows(rows)


class _LineEnds:
    """A stream that replaces `_LINE_BREAKS` at the end of a row by a newline."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix(_LINE_BREAKS) + "\n")
