"""The directory that a run writes to: acquire it, find its state, write run.json and summary.json.

run.json holds the options that determine the records, and is written before the first record; summary.json holds the
counts. A directory whose summary is missing or not complete holds a run that the same command resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from opal_deploy._version import __version__
from opal_deploy.artifact.files import lock_directory, read_json, remove_temporary_files, write_json
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.options import flag_of
from opal_deploy.records.run_files import OVERLAYS, REPORT, RESULTS, RUN, SHARDS, SHEETS, SUMMARY, remove_image_files
from opal_deploy.records.signatures import SignatureDigest, Signer
from opal_deploy.records.tables import TABLES
from opal_deploy.run.summary import Summary

SCHEMA = 1
# the key of a run's configuration that is not an option
IMAGES = "images"

State = Literal["new", "unfinished", "finished"]
# the options that determine records and drawings, and `images`; values as in JSON
RunConfig = Mapping[str, Any]

_HINT = "choose another --out, or give --overwrite"
_MAX_SHOWN = 60


@dataclass(frozen=True)
class InferenceRun:
    """A complete run.

    Attributes:
        out: the run directory, with overlays, sheets and tables where they were asked for.
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
        root, config: the directory, and the run's configuration.
        state: of the run that it holds.
        started, resumed: times when the run began and when it was resumed, ISO 8601.
        run_id: names the run in the signatures of its records.
        details: more entries of run.json.
    """

    root: Path
    config: RunConfig
    state: State = "new"
    started: str = ""
    resumed: list[str] = field(default_factory=list)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    details: Mapping[str, Any] = field(default_factory=dict)

    def write_config(self, details: Mapping[str, Any]) -> None:
        """Write run.json, with more entries, before the first record of a new or resumed run; raise UsageError."""
        self.details = details
        if self.state == "new":
            self.started = _now()
        else:
            self.resumed.append(_now())
        write_json(self.root / RUN, self._document())

    def _document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "opal_deploy": __version__,
            "id": self.run_id,
            "started": self.started,
            "resumed": self.resumed,
            "run": dict(self.config),
            **self.details,
        }

    def sign_config(self, summary: Summary, signer: Signer, *, complete: bool) -> None:
        """Write run.json with the number of records and a signature, when the run ends; raise StoppedEarly."""
        digest = summary.signatures or SignatureDigest()
        records = {"count": summary.total, "complete": complete, "signatures_sha256": digest.hexdigest()}
        # as it is read again: lists for tuples
        document = json.loads(json.dumps({**self._document(), "records": records}))
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
            "started": self.started,
            "resumed": self.resumed,
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

    def read_summary(self) -> dict[str, Any]:
        """Return the document of a complete run's summary.json."""
        return cast(dict[str, Any], read_json(self.root / SUMMARY))


@contextmanager
def acquire_run_dir(root: Path, config: RunConfig, *, overwrite: bool) -> Iterator[RunDirectory]:
    """Yield the directory to write to, which no other process can acquire while the block runs.

    Args:
        root: the directory.
        config: of the run.
        overwrite: remove the files of an earlier run in it.

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
    if not os.path.lexists(root / RUN):
        if os.path.lexists(root / RESULTS):
            raise UsageError(f"{root}: it holds the results of an earlier run; {_HINT}")
        return RunDirectory(root, config)
    document = _read(root / RUN)
    if document.get("schema", SCHEMA) != SCHEMA:
        raise UsageError(
            f"{root}/{RUN}: schema {document['schema']!r} found, {SCHEMA} expected; continue it with the "
            f"opal-deploy version that wrote it, {_HINT}"
        )
    if not {"run", "started", "resumed", "id"} <= document.keys():
        raise UsageError(f"{root}/{RUN}: damaged, so nothing can be continued there; {_HINT}")
    if different := _differences(document["run"], config):
        raise UsageError(f"{root}: it holds another run: {'; '.join(different)}; {_HINT}")
    summary, size = _read(root / SUMMARY), _size(root / RESULTS)
    # a summary of other results, or of results that are gone, says nothing
    is_finished = summary.get("complete") is True and size is not None and summary.get("results_bytes") == size
    state: State = "finished" if is_finished else "unfinished"
    return RunDirectory(root, config, state, document["started"], document["resumed"], document["id"])


def _differences(there: RunConfig, here: RunConfig) -> list[str]:
    # as run.json would hold it
    here = json.loads(json.dumps(here))
    names = [*here, *(name for name in there if name not in here)]
    return [
        f"{name if name == IMAGES else flag_of(name)} {_format_value(there.get(name))} there, "
        f"{_format_value(here.get(name))} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


def _format_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | dict):
        value = " ".join(map(str, value.values() if isinstance(value, dict) else value))
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _clear(root: Path) -> None:
    """Remove only the files of an earlier run."""
    try:
        # in this order: if interrupted, nothing is left that looks like a complete run
        for name in (SUMMARY, RUN, RESULTS, REPORT, *TABLES.values()):
            (root / name).unlink(missing_ok=True)
        for name in (OVERLAYS, SHEETS):
            remove_image_files(root, name)
            with contextlib.suppress(OSError):  # there is none, or it holds something else
                (root / name).rmdir()
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
    except OSError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
