"""What an earlier, unfinished run left in `results.jsonl`, and whether the images are still the same.

One pass over the records, beside the same pass over the images: memory does not grow with their number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from opal_deploy.errors import UsageError
from opal_deploy.explain.records import RECORD_SCHEMA, Record
from opal_deploy.pipeline.decoding.prepare import Request
from opal_deploy.pipeline.run.output import RESULTS

# a record is a few kilobytes; a damaged file may have no line ends at all
_LONGEST_LINE = 16 << 20
# drawings may reach the disk later than records: after a power failure the last ones may be missing or empty
_DRAWINGS_CHECKED = 32 << 20


@dataclass(frozen=True)
class Kept:
    """Records that stay.

    Attributes:
        count: of them. size: bytes of the file that hold them. dropped: bytes after these, which go.
    """

    count: int = 0
    size: int = 0
    dropped: int = 0


def take_up(out: Path, requests: Iterator[Request], count: Callable[[Record], None]) -> Kept:
    """Read the records that are there, and as many requests, which need no answer any more.

    Reading ends at the first line that is not a whole record: a process may have been killed while it wrote it, or the
    power may have failed before it reached the disk.

    Args:
        out: the run's folder.
        requests: those after the last record are left in it.
        count: is called with each record that stays.

    Raises:
        UsageError: the images are others than when the run was begun; nothing was changed.
    """
    path = out / RESULTS
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            end = _end_of_drawn(out, stream, size)
            stream.seek(0)
            kept, offset = 0, 0
            for line in _lines(stream, end):
                record = read_record(line)
                if record is None:
                    break
                _check(out, kept, record, next(requests, None))
                count(record)
                kept += 1
                offset += len(line)
    except FileNotFoundError:
        return Kept()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); choose another --out") from None
    return Kept(kept, offset, size - offset)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, one at a time, up to the first line that is none."""
    with path.open("rb") as stream:
        for line in _lines(stream, None):
            record = read_record(line)
            if record is None:
                return
            yield record


def read_record(line: bytes) -> Record | None:
    """The record that a line of results.jsonl holds; None if it is not a whole one."""
    if not line.endswith(b"\n"):
        return None
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("schema") != RECORD_SCHEMA or "image" not in found:
        return None
    status = found.get("status")
    needed = "error" if status == "error" else "prediction"
    if status not in ("ok", "abstained", "error") or not isinstance(found.get(needed), dict):
        return None
    return cast(Record, found)


def _lines(stream: BinaryIO, end: int | None) -> Iterator[bytes]:
    while end is None or stream.tell() < end:
        line = stream.readline(_LONGEST_LINE)
        if not line:
            return
        yield line


def _check(out: Path, index: int, record: Record, request: Request | None) -> None:
    if request is not None and request.name == record["image"]:
        return
    now = "there are no more images now" if request is None else f"now it is {request.name}"
    raise UsageError(
        f"{out}: the images are others than when this run was begun: number {index + 1} was {record['image']}, {now}; "
        "give the same images, another --out, or --overwrite"
    )


def _end_of_drawn(out: Path, stream: BinaryIO, size: int) -> int:
    """Where the first of the last records begins of which a drawing is missing or empty; the file's size if none is."""
    start = max(0, size - _DRAWINGS_CHECKED)
    stream.seek(start)
    if start:
        stream.readline(_LONGEST_LINE)
    while True:
        offset = stream.tell()
        record = read_record(stream.readline(_LONGEST_LINE))
        if record is None:
            return size
        drawn = (record.get("overlay"), record.get("sheet"))
        if not all(_is_there(out / name) for name in drawn if name is not None):
            return offset


def _is_there(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (OSError, ValueError):
        return False
