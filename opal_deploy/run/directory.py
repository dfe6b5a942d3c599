"""The directory that a run writes to: acquire it, find its state, write run.json, results.jsonl and summary.json.

run.json holds the options that determine the records, and is written before the first record; results.jsonl has one
line per record; summary.json holds the counts. A directory whose summary is missing or not complete holds a run that
the same command resumes. Memory does not grow with the number of records.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from opal_deploy._version import __version__
from opal_deploy.artifact.files import check_regular, lock_directory, read_json, remove_temporary_files, write_json
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.options import flag_of
from opal_deploy.records.lines import read_lines, to_json_line
from opal_deploy.records.record import Answered, Record
from opal_deploy.records.run_files import OVERLAYS, REPORT, RESULTS, RUN, SHARDS, SUMMARY, remove_overlays
from opal_deploy.records.signatures import SignatureDigest, Signer
from opal_deploy.records.tables import TABLES
from opal_deploy.run.summary import Summary
from opal_deploy.sources.image import InputImage

SCHEMA = 1
# the key of a run's configuration that is not an option
IMAGES = "images"

State = Literal["new", "unfinished", "finished"]
# the options that determine records and drawings, and `images`; values as in JSON
RunConfig = Mapping[str, Any]

# the most work that a power failure loses, in seconds; a killed process loses nothing
SYNC_SECONDS = 5.0
# pipes and devices have nothing to sync
_NOTHING_TO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)

_HINT = "choose another --out, or give --overwrite"


@dataclass(frozen=True)
class InferenceRun:
    """A complete run.

    Attributes:
        out: the run directory, with overlays and tables where they were asked for.
        summary: the document of summary.json: counts, accuracy, times, model and command.
        lines: what the command prints about the run.
    """

    out: Path
    summary: dict[str, Any] = field(repr=False)
    lines: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        """Return the number of images and the folder, and then what the command prints about the run."""
        return "\n".join([f"run of {sum(self.counts.values()):,} images in {self.out}", *self.lines])

    @property
    def records(self) -> Path:
        """The file with one record per image, in input order."""
        return self.out / RESULTS

    @property
    def report(self) -> Path | None:
        """The HTML page; None without `explain`."""
        return self.out / REPORT if (self.out / REPORT).exists() else None

    @property
    def counts(self) -> dict[str, int]:
        """Number of images by status: `ok`, `abstained`, `unknown`, `error`."""
        return dict(self.summary["statuses"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy against `labels`; None without labels."""
        return None if self.summary["accuracy"] is None else self.summary["accuracy"]["accuracy"]


@dataclass
class RunDirectory:
    """A run directory that only this process uses.

    Attributes:
        root: the directory.
        state: of the run that it holds.
        document: of run.json, without a signature: the run's configuration, its `id` in the signatures of records, and
            the times when it began and was resumed.
    """

    root: Path
    state: State
    document: dict[str, Any]

    def write_config(self) -> None:
        """Write run.json before the first record of a new or resumed run; raise UsageError."""
        if self.state == "unfinished":
            self.document["resumed"].append(_now())
        write_json(self.root / RUN, self.document)

    def sign_config(self, summary: Summary, signer: Signer, *, complete: bool) -> None:
        """Write run.json with the number of records and a signature, when the run ends; raise StoppedEarly."""
        digest = summary.signatures or SignatureDigest()
        records = {"count": summary.total, "complete": complete, "signatures_sha256": digest.hexdigest()}
        document = {**self.document, "records": records}
        self._write_at_end(RUN, {**document, "signature": signer.sign_document(document)})

    def write_summary(self, summary: Summary, context: Mapping[str, Any], stopped: str | None = None) -> dict[str, Any]:
        """Write summary.json, and return its document; raise StoppedEarly if that fails.

        `context` has model, runtime and command; `stopped` is why the run ended before its images did.
        """
        document = {
            "schema": SCHEMA,
            "complete": stopped is None,
            "stopped": stopped,
            "out": self.root.name if self.root.is_absolute() else str(self.root),
            **summary.to_dict(),
            **context,
            "opal_deploy": __version__,
            "started": self.document["started"],
            "resumed": self.document["resumed"],
            "ended": _now(),
            "results_bytes": _size(self.root / RESULTS),
        }
        self._write_at_end(SUMMARY, document)
        return document

    def _write_at_end(self, name: str, document: Mapping[str, Any]) -> None:
        try:
            write_json(self.root / name, document)
        except UsageError as error:
            raise StoppedEarly(f"{error}; all records are in {RESULTS}") from None


@contextmanager
def acquire_run_dir(root: Path, config: RunConfig, *, overwrite: bool) -> Iterator[RunDirectory]:
    """Yield the directory to write to, which no other process can acquire while the block runs.

    With `overwrite`, the files of an earlier run in it are removed.

    Raises:
        UsageError: it holds another run, another process uses it, or it cannot be written to.
    """
    with lock_directory(root):
        for name in (RUN, SUMMARY, REPORT, *TABLES.values()):
            remove_temporary_files(root / name)
        if overwrite:
            _clear(root)
        yield inspect_run_dir(root, config)


def inspect_run_dir(root: Path, config: RunConfig) -> RunDirectory:
    """Return the directory with the state of its run; raise UsageError if it holds another than that of `config`."""
    document = {
        "schema": SCHEMA, "opal_deploy": __version__, "id": uuid.uuid4().hex, "started": _now(), "resumed": [],
        # as it is read again: lists for tuples
        "run": json.loads(json.dumps(config)),
    }  # fmt: skip
    if not os.path.lexists(root / RUN):
        if os.path.lexists(root / RESULTS):
            raise UsageError(f"{root}: it holds the results of an earlier run; {_HINT}")
        return RunDirectory(root, "new", document)
    stored = _read(root / RUN)
    if stored.get("schema", SCHEMA) != SCHEMA:
        raise UsageError(
            f"{root}/{RUN}: schema {stored['schema']!r} found, {SCHEMA} expected; continue it with the "
            f"opal-deploy version that wrote it, {_HINT}"
        )
    if not document.keys() <= stored.keys():
        raise UsageError(f"{root}/{RUN}: damaged, so nothing can be continued there; {_HINT}")
    if different := _differences(stored["run"], document["run"]):
        raise UsageError(f"{root}: it holds another run: {'; '.join(different)}; {_HINT}")
    summary, size = _read(root / SUMMARY), _size(root / RESULTS)
    # a summary of other results, or of results that are gone, says nothing
    is_finished = summary.get("complete") is True and size is not None and summary.get("results_bytes") == size
    document |= {key: stored[key] for key in ("id", "started", "resumed")}
    return RunDirectory(root, "finished" if is_finished else "unfinished", document)


def _differences(stored: RunConfig, config: RunConfig) -> list[str]:
    return [
        f"{name if name == IMAGES else flag_of(name)} {_format_value(stored.get(name))} there, "
        f"{_format_value(config.get(name))} here"
        for name in {**config, **stored}
        if stored.get(name) != config.get(name)
    ]


def _format_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | dict):
        value = " ".join(map(str, value.values() if isinstance(value, dict) else value))
    return str(value)


def _clear(root: Path) -> None:
    """Remove only the files of an earlier run."""
    try:
        # in this order: if interrupted, nothing is left that looks like a complete run
        for name in (SUMMARY, RUN, RESULTS, REPORT, *TABLES.values()):
            (root / name).unlink(missing_ok=True)
        remove_overlays(root)
        with contextlib.suppress(OSError):  # there is none, or it holds something else
            (root / OVERLAYS).rmdir()
        if (root / SHARDS).is_dir():
            shutil.rmtree(root / SHARDS)
    except OSError as error:
        raise UsageError(f"{root}: cannot be written ({error.strerror or error}); choose another --out") from None


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file is missing or damaged."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
        # an exception is not replaced by another one
        with self._stream, contextlib.nullcontext() if kind is None else contextlib.suppress(StoppedEarly):
            self.sync()


def load_resume_point(out: Path, images: Iterator[InputImage], count: Callable[[Record], None]) -> tuple[int, int]:
    """Read the records of an unfinished run, and take as many images, which are done.

    Returns the number of whole records at the beginning of the file, after which the run resumes, and their bytes.
    Reading ends at the first line that is not a whole record, or whose overlay is missing or empty: a process may have
    been killed while it wrote, or the power may have failed before data reached the disk.

    Args:
        out: the run directory.
        images: all images of the run; left at the first one without a record.
        count: is called with each whole record.

    Raises:
        UsageError: the images are not those of the run; nothing was changed.
    """
    path, num_records, offset = out / RESULTS, 0, 0
    try:
        check_regular(path)
        with path.open("rb") as stream:
            for line in read_lines(stream):
                record = line.record
                if record is None or not _has_overlay(out, record):
                    break
                _check_same_image(out, num_records, record, next(images, None))
                count(record)
                num_records += 1
                offset += line.size
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); choose another --out") from None
    return num_records, offset


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


def _has_overlay(out: Path, record: Record) -> bool:
    """Return whether the overlay that a record names is in the run directory, and not empty."""
    return not isinstance(record, Answered) or record.overlay is None or bool(_size(out / record.overlay))
