"""The file of records, results.jsonl: append to it, read it, and find where an interrupted run resumes.

Memory does not grow with the number of records.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opal_deploy.artifact.files import check_regular
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.records.lines import read_lines, to_json_line
from opal_deploy.records.record import Answered, Record
from opal_deploy.records.run_files import RESULTS
from opal_deploy.sources.image import InputImage

# the most work that a power failure loses, in seconds; a killed process loses nothing
SYNC_SECONDS = 5.0
# pipes and devices have nothing to sync
_NOTHING_TO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)


class RecordWriter:
    """A JSON Lines file to append records to, which holds only whole lines at any moment, even after an error.

    A written record survives the process at once, and a power failure after at most `SYNC_SECONDS`.

    Args:
        path: the file.
        keep, count: bytes of the file to keep, and number of records in them; the bytes after them are cut off.
    """

    def __init__(self, path: Path, keep: int = 0, count: int = 0) -> None:
        self.path = path
        self.count = count
        try:
            # unbuffered: lines are either written by one call, or cut off again
            self._stream = path.open("r+b" if keep else "wb", buffering=0)
            if keep:
                self._stream.truncate(keep)
                self._stream.seek(keep)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None
        self._synced = time.monotonic()

    def write(self, *records: Record) -> None:
        """Append records in one system call; raise StoppedEarly if the disk is full: whole records stay and count."""
        lines = [to_json_line(record) for record in records]
        data, start = b"".join(lines), self._stream.tell()
        written = 0
        try:
            while written < len(data):
                written += self._stream.write(data[written:])
        except OSError as error:
            whole = list(itertools.takewhile(lambda end: end <= written, itertools.accumulate(map(len, lines))))
            with contextlib.suppress(OSError):  # a device that is gone cannot be cut either
                self._stream.truncate(start + (whole[-1] if whole else 0))
            self.count += len(whole)
            raise self._failed(error) from None
        self.count += len(lines)
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush all records to disk; raise StoppedEarly if that fails, or if the file is no longer at its path."""
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            if error.errno not in _NOTHING_TO_SYNC:
                raise self._failed(error) from None
        try:
            present = os.path.samestat(os.fstat(self._stream.fileno()), self.path.stat())
        except OSError:
            present = False
        if not present:
            raise StoppedEarly(
                f"{self.path}: removed or replaced during the run, with {self.count} records in it; leave the folder "
                "as it is until the run ends"
            )
        self._synced = time.monotonic()

    def _failed(self, error: OSError) -> StoppedEarly:
        return StoppedEarly(
            f"{self.path}: cannot be written any more ({error.strerror or error}); "
            f"the {self.count} records before are whole; make room and run again"
        )

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            if kind is None:
                self.sync()
            else:
                with contextlib.suppress(StoppedEarly):
                    self.sync()
        finally:
            self._stream.close()


@dataclass(frozen=True)
class ResumePoint:
    """The whole records at the beginning of a file, after which a run resumes: `count` records in `size` bytes.

    `damaged` bytes after them hold no whole record.
    """

    count: int = 0
    size: int = 0
    damaged: int = 0


def load_resume_point(out: Path, images: Iterator[InputImage], count: Callable[[Record], None]) -> ResumePoint:
    """Read the records of an unfinished run, and take as many images, which are done.

    Reading ends at the first line that is not a whole record, or whose drawing is missing or empty: a process may have
    been killed while it wrote, or the power may have failed before data reached the disk.

    Args:
        out: the run directory.
        images: the images of the run; left at the first one without a record.
        count: is called with each whole record.

    Raises:
        UsageError: the images are not those of the run; nothing was changed.
    """
    path = out / RESULTS
    try:
        check_regular(path)
        size = path.stat().st_size
        with path.open("rb") as stream:
            num_records, offset = 0, 0
            for line in read_lines(stream):
                record = line.record
                if record is None or not has_drawings(out, record):
                    break
                _check_same_image(out, num_records, record, next(images, None))
                count(record)
                num_records += 1
                offset += line.size
    except FileNotFoundError:
        return ResumePoint()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); choose another --out") from None
    return ResumePoint(num_records, offset, size - offset)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, up to the first line that is not a whole record."""
    with path.open("rb") as stream:
        for line in read_lines(stream):
            if line.record is None:
                return
            yield line.record


def _check_same_image(out: Path, index: int, record: Record, image: InputImage | None) -> None:
    if image is not None and image.name == record.image:
        return
    now = "there are no more images now" if image is None else f"now it is {image.name}"
    raise UsageError(
        f"{out}: the images have changed since this run began: number {index + 1} was {record.image}, {now}; "
        "give the same images, another --out, or --overwrite"
    )


def has_drawings(out: Path, record: Record) -> bool:
    """Return whether the drawings that a record names are in the run directory, and not empty."""
    names = (record.overlay, record.sheet) if isinstance(record, Answered) else ()
    return all(_has_content(out / name) for name in names if name is not None)


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (OSError, ValueError):
        return False
