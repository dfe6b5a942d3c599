"""The output folder: `results.jsonl`, overlays, and the report."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from types import TracebackType

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.explain.records import Record

RESULTS = "results.jsonl"
OVERLAYS = "overlays"
REPORT = "report.html"

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_LENGTH = 80


def new_folder(wanted: Path | None, *, overwrite: bool) -> Path:
    """The folder to write to, made.

    Args:
        wanted: None: `explanations`, or the first of `explanations-2`, `-3`, ... that does not exist yet.
        overwrite: an earlier run's files in `wanted` may go.

    Raises:
        UsageError: it holds an earlier run, or cannot be made.
    """
    folder = wanted or _first_free(Path("explanations"))
    # os.path: unlike pathlib's it is False, not an error, where the answer is refused
    if os.path.lexists(folder / RESULTS) and not overwrite:
        raise UsageError(f"{folder}: it holds the results of an earlier run; choose another --out, or give --overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (folder / RESULTS, folder / REPORT, *(folder / OVERLAYS).glob("*.jpg")):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error}); choose another --out") from None
    return folder


def _first_free(base: Path) -> Path:
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def overlay_name(index: int, image: str | None) -> str:
    """A file name that is unique in a run and safe everywhere, whatever the image is called."""
    stem = Path(image).name if image else ""
    safe = _UNSAFE.sub("_", stem)[:_STEM_LENGTH].strip("._") or "image"
    return f"{OVERLAYS}/{index:06d}-{safe}.jpg"


class RecordWriter:
    """Appends records to a JSON Lines file; at any moment it holds whole lines only, after an error too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        try:
            # unbuffered: a line is either written by one call, or cut off again
            self._stream = path.open("wb", buffering=0)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None

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
            raise StoppedEarly(
                f"{self.path}: cannot be written any more ({error.strerror or error}); "
                f"the {self.count} records before are whole; make room and run again"
            ) from None
        self.count += 1

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
