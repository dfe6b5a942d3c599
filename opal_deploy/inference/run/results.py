"""The file that a run appends its records to.

What an earlier, unfinished run left in `results.jsonl`, and whether the images are still the same.

One pass over the records, beside the same pass over the images: memory does not grow with their number."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.inference.decoding.prepare import Request
from opal_deploy.records.record import RECORD_SCHEMA, Record

RESULTS = "results.jsonl"
REPORT = "report.html"

# so much work is lost at most when the power fails; a killed process loses none of what was written
SYNC_SECONDS = 5.0

# pipes and devices have nothing to sync
_NOTHING_TO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)


class RecordWriter:
    """Appends records to a JSON Lines file; at any moment it holds whole lines only, after an error too.

    What was written survives the process at once, and a power failure after `SYNC_SECONDS` at the latest.

    Args:
        path: of the file.
        keep: bytes of it that stay; what comes after them is cut off.
        count: records in these bytes.
    """

    def __init__(self, path: Path, keep: int = 0, count: int = 0) -> None:
        self.path = path
        self.count = count
        try:
            # unbuffered: a line is either written by one call, or cut off again
            self._stream = path.open("r+b" if keep else "wb", buffering=0)
            if keep:
                self._stream.truncate(keep)
                self._stream.seek(keep)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None
        self._synced = time.monotonic()

    def write(self, record: Record) -> None:
        """Append one record.

        Raises:
            StoppedEarly: the disk is full or gone; the records so far are whole.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        start = self._stream.tell()
        try:
            written = 0
            while written < len(line):
                written += self._stream.write(line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):  # a device that is gone cannot be cut either
                self._stream.truncate(start)
            raise self._failed(error) from None
        self.count += 1
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Hand everything to the disk.

        Raises:
            StoppedEarly: it does not take it.
        """
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            if error.errno not in _NOTHING_TO_SYNC:
                raise self._failed(error) from None
        self._synced = time.monotonic()

    def _failed(self, error: OSError) -> StoppedEarly:
        return StoppedEarly(
            f"{self.path}: cannot be written any more ({error.strerror or error}); "
            f"the {self.count} records before are whole; make room and run again"
        )

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.sync()
            else:
                with contextlib.suppress(StoppedEarly):
                    self.sync()
        finally:
            self._stream.close()


# a record is a few kilobytes; a damaged file may have no line ends at all
_LONGEST_LINE = 16 << 20
# drawings may reach the disk later than records: after a power failure the last ones may be missing or empty
_DRAWINGS_CHECKED = 32 << 20


@dataclass(frozen=True)
class ResumePoint:
    """Records that stay.

    Attributes:
        count: of them. size: bytes of the file that hold them. dropped: bytes after these, which go.
    """

    count: int = 0
    size: int = 0
    dropped: int = 0


def load_resume_point(out: Path, requests: Iterator[Request], count: Callable[[Record], None]) -> ResumePoint:
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
        return ResumePoint()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); choose another --out") from None
    return ResumePoint(kept, offset, size - offset)


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
