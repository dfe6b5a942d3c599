"""The file that a run appends its records to."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from types import TracebackType

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.explain.records import Record

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
