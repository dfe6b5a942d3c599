"""The folder that a run writes to: whose it is, whether it can go on there, and what is told of it at the end.

`run.json` says what the run is, before its first record; `summary.json` what came of it. A folder whose summary is
missing, or not complete, holds a run that can be continued by the same call.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from opal_deploy._version import __version__
from opal_deploy.artifact.files import lock_directory, remove_temporary_files, write_json
from opal_deploy.errors import UsageError
from opal_deploy.inference.run.image_files import OVERLAYS, SHEETS, remove_drawings
from opal_deploy.inference.run.results import REPORT, RESULTS
from opal_deploy.inference.run.summary import Summary
from opal_deploy.records.tables import TABLES

RUN, SUMMARY = "run.json", "summary.json"
SCHEMA = 1
DEFAULT = "explanations"
# the key of an identity that is no option
IMAGES = "images"

State = Literal["new", "unfinished", "finished"]
RunConfig = Mapping[str, Any]

_ADVICE = "choose another --out, or give --overwrite"
_SHOWN = 60


@dataclass
class RunDirectory:
    """A folder that this process has for itself.

    Attributes:
        root: the folder.
        identity: what decides the records and drawings: the options by their names, and `images`; plain values.
        state: what is there already.
        started: when the run was begun. resumed: when it was taken up again.
    """

    root: Path
    identity: RunConfig
    state: State = "new"
    started: str = ""
    resumed: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Note that a run begins here, or goes on; before its first record.

        Raises:
            UsageError: the folder cannot be written to.
        """
        if self.state == "new":
            self.started = _now()
        else:
            self.resumed.append(_now())
        document = {
            "schema": SCHEMA,
            "opal_deploy": __version__,
            "started": self.started,
            "resumed": self.resumed,
            "run": dict(self.identity),
        }
        write_json(self.root / RUN, document)

    def end(self, summary: Summary, about: Mapping[str, Any], stopped: str | None = None) -> dict[str, Any]:
        """Write summary.json; returns what it holds.

        Args:
            summary: the counts.
            about: what else is to be said: the model, the runtime, the command.
            stopped: why the run ended before its images did; None if it did not.

        Raises:
            UsageError: it cannot be written.
        """
        document = {
            "schema": SCHEMA,
            "complete": stopped is None,
            "stopped": stopped,
            "out": self.root.name if self.root.is_absolute() else str(self.root),
            **summary.to_dict(),
            **about,
            "opal_deploy": __version__,
            "started": self.started,
            "resumed": self.resumed,
            "ended": _now(),
            "results_bytes": _size(self.root / RESULTS),
        }
        write_json(self.root / SUMMARY, document)
        return document

    def read_summary(self) -> dict[str, Any]:
        """What a finished run's summary.json holds."""
        return cast(dict[str, Any], json.loads((self.root / SUMMARY).read_text(encoding="utf-8")))


@contextmanager
def acquire_run_dir(
    wanted: Path | None, identity: RunConfig, *, resume: bool, overwrite: bool
) -> Iterator[RunDirectory]:
    """The folder to write to, which no other process can claim while the block runs.

    Args:
        wanted: None: the latest unfinished `explanations*` of the same identity, if `resume`; else the first of
            `explanations`, `explanations-2`, ... that does not exist yet.
        identity: see RunFolder.
        resume: go on where an unfinished run of the same identity ended.
        overwrite: an earlier run's files in `wanted` may go.

    Raises:
        UsageError: it holds another run, another process is at work there, or it cannot be written to.
    """
    root = wanted or (_unfinished(Path(DEFAULT), identity) if resume else None) or _first_free(Path(DEFAULT))
    with lock_directory(root):
        for name in (RUN, SUMMARY, REPORT, *TABLES.values()):
            remove_temporary_files(root / name)
        if overwrite:
            _clear(root)
        folder = inspect_run_dir(root, identity)
        if folder.state == "unfinished" and not resume:
            raise UsageError(f"{root}: it holds an unfinished run, and --no-resume was given; {_ADVICE}")
        yield folder


def inspect_run_dir(root: Path, identity: RunConfig) -> RunDirectory:
    """What a folder holds.

    Raises:
        UsageError: a run that is another, or results that nothing is known of.
    """
    if not os.path.lexists(root / RUN):
        if os.path.lexists(root / RESULTS):
            raise UsageError(f"{root}: it holds the results of an earlier run; {_ADVICE}")
        return RunDirectory(root, identity)
    there = _read(root / RUN)
    if there is None or not isinstance(there.get("run"), dict):
        raise UsageError(f"{root / RUN}: damaged, or of another version, so nothing can be continued there; {_ADVICE}")
    if different := _differences(there["run"], identity):
        raise UsageError(f"{root}: it holds a run of its own: {'; '.join(different)}; {_ADVICE}")
    summary = _read(root / SUMMARY) or {}
    # a summary is of these results, or it says nothing
    finished = summary.get("complete") is True and summary.get("results_bytes") == _size(root / RESULTS)
    started, resumed = there.get("started"), there.get("resumed")
    return RunDirectory(
        root,
        identity,
        "finished" if finished else "unfinished",
        str(started),
        [str(time) for time in resumed] if isinstance(resumed, list) else [],
    )


def _differences(there: RunConfig, here: RunConfig) -> list[str]:
    # as run.json would hold it
    here = json.loads(json.dumps(here))
    names = [*here, *(name for name in there if name not in here)]
    return [
        f"{_option(name)} {_shown(there.get(name))} there, {_shown(here.get(name))} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


def _option(name: str) -> str:
    return name if name == IMAGES else "--" + name.replace("_", "-")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | dict):
        value = " ".join(map(str, value.values() if isinstance(value, dict) else value))
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _unfinished(base: Path, identity: RunConfig) -> Path | None:
    """The latest folder of `base`'s names that holds an unfinished run of this identity."""
    numbered = []
    for path in base.parent.glob(f"{base.name}*"):
        found = re.fullmatch(r"(?:-(\d+))?", path.name[len(base.name) :])
        if found and (path / RUN).is_file():
            numbered.append((int(found[1] or 1), path))
    for _, path in sorted(numbered, reverse=True):
        with contextlib.suppress(UsageError):
            if inspect_run_dir(path, identity).state == "unfinished":
                return path
    return None


def _first_free(base: Path) -> Path:
    candidate, number = base, 1
    while os.path.lexists(candidate):
        number += 1
        candidate = base.with_name(f"{base.name}-{number}")
    return candidate


def _clear(root: Path) -> None:
    """Take away an earlier run's files and no others."""
    try:
        # in this order: whenever this is cut short, nothing is left that looks like a finished run
        for name in (SUMMARY, RUN, RESULTS, REPORT, *TABLES.values()):
            (root / name).unlink(missing_ok=True)
        for name in (OVERLAYS, SHEETS):
            remove_drawings(root, name)
            with contextlib.suppress(OSError):  # there is none, or it holds something else
                (root / name).rmdir()
    except OSError as error:
        raise UsageError(f"{root}: cannot be written ({error.strerror or error}); choose another --out") from None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and document.get("schema") == SCHEMA else None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
