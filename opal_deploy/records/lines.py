"""Lines of JSON and CSV that every reader splits alike.

Unicode's rules, and with them `str.splitlines`, end a line at more characters than a newline, and a file's name may
hold any of them. Inside a JSON string they are escaped; CSV has no escapes, so its fields that hold one are quoted.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

import orjson

# the characters that end a line for `str.splitlines`; UAX #14 has no others
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# line breaks that JSON allows inside a string, and the other control characters above ASCII's, which steer terminals
_ESCAPED_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")


def to_json_line(document: object) -> bytes:
    """Return a document of finite numbers as one line of JSON in UTF-8, with its line end."""
    try:
        line = orjson.dumps(document)
    except orjson.JSONEncodeError:
        # a lone surrogate, which becomes \udcff, and JSON reads that as such
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        line = text.encode("utf-8", "backslashreplace")
    if not line.isascii() or b"\x7f" in line:
        line = _ESCAPED_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line.decode()).encode()
    return line + b"\n"


def write_csv(stream: TextIO, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows of CSV that end in a newline.

    Args:
        stream: opened with `newline=""`.
        header: the names of the columns.
        rows: in the order of the columns; None is an empty field.
    """
    # the csv module quotes a field for the characters of its line end, and before Python 3.13 for no others
    writer = csv.writer(_LineEnds(stream), lineterminator=_LINE_BREAKS)
    writer.writerow(header)
    writer.writerows(rows)


class _LineEnds:
    """A stream for rows that end in `_LINE_BREAKS`, where they end in a newline."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix(_LINE_BREAKS) + "\n")
