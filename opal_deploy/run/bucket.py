"""A run directory in a bucket: a local directory whose files are uploaded, and whose run any machine can resume.

An object cannot be appended to. During a run, its records therefore go up as parts, objects that are written once and
never changed: `parts/ID/N.jsonl` begins with record N of the run ID, which run.json names. A part is created only if it
does not exist, so if two processes write to one run at the same time, one fails: the parts hold each record once and in
order. Overlays and sheets go up before the part that names them. After the last record, results.jsonl is uploaded as a
whole, then tables and report, and last summary.json, which marks the run as complete; then the parts are removed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from opal_deploy.artifact.files import read_json
from opal_deploy.errors import ImageError, OpalError, StoppedEarly, UsageError
from opal_deploy.records.lines import read_lines
from opal_deploy.records.run_files import OVERLAYS, PARTS, REPORT, RESULTS, RUN, SHEETS, SUMMARY
from opal_deploy.records.signatures import Signer
from opal_deploy.records.tables import TABLES, Format
from opal_deploy.run.directory import RunConfig, RunDirectory, inspect_run_dir
from opal_deploy.run.summary import Summary
from opal_deploy.storage import buckets
from opal_deploy.storage.files import RemoteFile

# seconds between two parts: the most work that is lost with this machine
PART_SECONDS = 10.0
_MAX_PART_BYTES = 32 << 20


@dataclass
class BucketRunDirectory(RunDirectory):
    """A run directory in a bucket; `root` is a local one, removed after the block of `acquire_bucket_run_dir`."""

    _bytes: int = 0
    _records: int = 0
    _begun: float = field(default_factory=time.monotonic)
    _upload: Future[None] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "upload"))

    def write_config(self) -> None:
        """Write run.json; raise UsageError if another process has just begun a run there, or StoppedEarly."""
        new = self.state == "new"
        self.details = {**self.details, "parts": self.run_id}
        super().write_config()
        data = (self.root / RUN).read_bytes()
        if not new:
            buckets.write_bytes(self._file(RUN), data)
        elif not buckets.create(self._file(RUN), data):
            raise UsageError(f"{self.remote}: another process has just begun a run there; give another --out")
        self._begun = time.monotonic()

    def sign_config(self, summary: Summary, signer: Signer, *, complete: bool) -> None:
        """Write run.json again, with the number of records and a signature; raise StoppedEarly."""
        super().sign_config(summary, signer, complete=complete)
        buckets.upload(self._file(RUN), self.root / RUN)

    def save_progress(self) -> None:
        """Upload the records since the last part, in the background, if that is due; raise StoppedEarly."""
        if self._upload is not None:
            if not self._upload.done():
                return
            self._upload.result()
            self._upload = None
        if time.monotonic() - self._begun >= PART_SECONDS:
            self._begun = time.monotonic()
            self._upload = self._thread.submit(self._upload_parts, (self.root / RESULTS).stat().st_size)

    def write_summary(self, summary: Summary, context: Mapping[str, Any], stopped: str | None = None) -> dict[str, Any]:
        """Upload missing files, summary.json last, and return its document; raise StoppedEarly or UsageError."""
        document = super().write_summary(summary, context, stopped)
        if self._upload is not None:
            self._upload.result()
        with suppress(FileNotFoundError):
            self._upload_parts((self.root / RESULTS).stat().st_size)
        if stopped is None:
            for name in (RESULTS, *TABLES.values(), REPORT):
                if (self.root / name).exists():
                    buckets.upload(self._file(name), self.root / name)
        buckets.upload(self._file(SUMMARY), self.root / SUMMARY)
        if stopped is None:
            # they are in results.jsonl; leftovers do no harm
            with suppress(OpalError):
                buckets.remove(file for _, file in buckets.list_files(self._file(PARTS), recursive=True))
        return document

    def has(self, name: str) -> bool:
        """Return whether a file exists."""
        return _read(self._file(name), at_most=1) is not None

    def write_table(self, kind: Format) -> None:
        """Write a table of the records of a complete run."""
        _download(self._file(RESULTS), self.root / RESULTS)
        super().write_table(kind)
        buckets.upload(self._file(TABLES[kind]), self.root / TABLES[kind])

    def close(self) -> None:
        """Finish the upload in flight."""
        self._thread.shutdown(wait=True)

    def restore(self) -> None:
        """Write the records of an unfinished run to the local results.jsonl; raise UsageError if a part is damaged."""
        with (self.root / RESULTS).open("wb") as results:
            for name, file in buckets.list_files(self._file(f"{PARTS}/{self.run_id}"), recursive=False):
                with file.open() as stream:
                    data = stream.read()
                lines = list(read_lines(io.BytesIO(data)))
                if name != _part_name(self._records) or any(line.record is None for line in lines):
                    raise UsageError(
                        f"{file}: it, or the part before it, is damaged or missing, so the run cannot be resumed; give "
                        "another --out, or --overwrite"
                    )
                results.write(data)
                self._records, self._bytes = self._records + len(lines), self._bytes + len(data)

    def _upload_parts(self, end: int) -> None:
        """Upload the records in the first `end` bytes of results.jsonl that are in no part yet."""
        with (self.root / RESULTS).open("rb") as results:
            while self._bytes < end:
                results.seek(self._bytes)
                data = results.read(min(end - self._bytes, _MAX_PART_BYTES))
                data = data[: data.rfind(b"\n") + 1] or data + results.readline()
                if not buckets.create(self._file(f"{PARTS}/{self.run_id}/{_part_name(self._records)}"), data):
                    raise StoppedEarly(
                        f"{self.remote}: another process writes to this run, and has written record {self._records + 1}"
                    )
                self._records, self._bytes = self._records + data.count(b"\n"), self._bytes + len(data)

    def _file(self, name: str) -> RemoteFile:
        assert self.remote is not None
        return self.remote.child(name)


def _part_name(first: int) -> str:
    return f"{first:012d}.jsonl"


@contextmanager
def acquire_bucket_run_dir(
    remote: RemoteFile, config: RunConfig, *, resume: bool, overwrite: bool
) -> Iterator[RunDirectory]:
    """Yield a run directory in a bucket; see `acquire_run_dir`; raise StoppedEarly if it cannot be written to."""
    with TemporaryDirectory(prefix="opal-deploy-run-") as folder:
        root = Path(folder)
        try:
            if overwrite:
                _clear(remote)
            directory = _inspect(root, remote, config)
            if directory.state == "unfinished":
                if not resume:
                    raise UsageError(
                        f"{remote}: it holds an unfinished run, and --no-resume was given; choose another --out, or "
                        "give --overwrite"
                    )
                directory.restore()
        except ImageError as error:
            raise UsageError(f"{remote}: cannot be read: {error}; choose another --out") from None
        try:
            yield directory
        finally:
            directory.close()


def _inspect(root: Path, remote: RemoteFile, config: RunConfig) -> BucketRunDirectory:
    for name in (RUN, SUMMARY):
        data = _read(remote.child(name))
        if data is not None:
            (root / name).write_bytes(data)
    size = _size(remote.child(RESULTS))
    found = inspect_run_dir(root, config, shown=str(remote), results_bytes=size)
    run_id = found.run_id
    if found.state != "new":
        run_id = str(read_json(root / RUN).get("parts", ""))
        if found.state == "unfinished" and not run_id.isalnum():
            raise UsageError(f"{remote}: the run there was not begun in a bucket, so it cannot be resumed there")
    return BucketRunDirectory(
        root, config, found.state, found.started, found.resumed, remote, found.details, run_id=run_id
    )


def _clear(remote: RemoteFile) -> None:
    """Remove only the files of an earlier run; first the ones that mark it as a run, as in a local directory."""
    for name in (SUMMARY, RUN, RESULTS, REPORT, *TABLES.values()):
        buckets.remove([remote.child(name)])
    for folder in (PARTS, OVERLAYS, SHEETS):
        buckets.remove(file for _, file in buckets.list_files(remote.child(folder), recursive=True))


def _read(file: RemoteFile, at_most: int = 1 << 30) -> bytes | None:
    """Return an object's bytes; None if it does not exist."""
    try:
        with file.open_ranges() as stream:
            return stream.read(at_most)
    except ImageError as error:
        if error.code == "not_found":
            return None
        raise


def _size(file: RemoteFile) -> int | None:
    try:
        return file.read_fingerprint().size
    except ImageError as error:
        if error.code == "not_found":
            return None
        raise


def _download(file: RemoteFile, path: Path) -> None:
    with file.open_ranges(_MAX_PART_BYTES) as stream, path.open("wb") as target:
        while chunk := stream.read(_MAX_PART_BYTES):
            target.write(chunk)
