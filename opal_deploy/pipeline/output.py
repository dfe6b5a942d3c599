"""What a run writes one by one: records, and overlays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from pathlib import Path
from types import TracebackType

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.explain.records import Record

RESULTS = "results.jsonl"
OVERLAYS = "overlays"
REPORT = "report.html"

# so much work is lost at most when the power fails; a killed process loses none of what was written
SYNC_SECONDS = 5.0
OVERLAYS_A_FOLDER = 10_000

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_LENGTH = 80
# pipes and devices have nothing to sync
_NOTHING_TO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)


def overlay_name(index: int, image: str | None) -> str:
    """A file name that is unique in a run and safe everywhere, whatever the image is called.

    From the ten-thousandth on in subfolders of ten thousand each: no folder holds millions.
    """
    stem = Path(image).name if image else ""
    safe = _UNSAFE.sub("_", stem)[:_STEM_LENGTH].strip("._") or "image"
    folder, name = index // OVERLAYS_A_FOLDER, f"{index:06d}-{safe}.jpg"
    return f"{OVERLAYS}/{folder:04d}/{name}" if folder else f"{OVERLAYS}/{name}"


def write_overlay(out: Path, name: str, encoded: bytes) -> None:
    """Write `out/name`; a process that is killed meanwhile leaves no half picture under that name.

    Raises:
        StoppedEarly: the disk is full or gone.
    """
    path = out / name
    temporary = path.with_name(f".{path.name}.part")
    try:
        try:
            temporary.write_bytes(encoded)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(encoded)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoppedEarly(f"{path}: cannot be written ({error.strerror or error}); make room and run again") from None


def remove_overlays(out: Path, first: int = 0) -> None:
    """Remove overlays of the image `first` and of all after it, and what a killed process left of one.

    Raises:
        OSError: one cannot be removed.
    """
    root = out / OVERLAYS
    if not root.is_dir() or root.is_symlink():
        return
    numbered = [path for path in root.iterdir() if re.fullmatch(r"\d{4,}", path.name) and path.is_dir()]
    for folder in (root, *numbered):
        # the others hold only earlier images
        if folder is not root and int(folder.name) < first // OVERLAYS_A_FOLDER:
            continue
        for path in folder.iterdir():
            drawn = re.match(r"(\d{6,})-.*\.jpg$", path.name)
            half = re.match(r"\.\d{6,}-.*\.part$", path.name)
            if half or (drawn and int(drawn[1]) >= first):
                path.unlink(missing_ok=True)
        if folder is not root:
            with contextlib.suppress(OSError):  # it holds something else
                folder.rmdir()


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
