"""A complete run: its folder and files, its counts, and what the command prints about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opal_deploy.records.run_files import OVERLAYS, REPORT, RESULTS, SHEETS
from opal_deploy.records.tables import TABLES


@dataclass(frozen=True)
class InferenceRun:
    """A complete run.

    Attributes:
        out: the run directory.
        summary: the document of summary.json: counts, accuracy, times, model and command.
        lines: what the command prints about the run.
    """

    out: Path
    summary: dict[str, Any] = field(repr=False)
    lines: tuple[str, ...] = field(default=(), repr=False)
    _files: frozenset[str] = field(default=frozenset(), repr=False)

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
        return self.out / REPORT if REPORT in self._files else None

    @property
    def overlays(self) -> Path | None:
        """The folder of overlays; None without `explain`. Each record names its own in `overlay`."""
        return self.out / OVERLAYS if REPORT in self._files else None

    @property
    def sheets(self) -> Path | None:
        """The folder of evidence sheets; None without `sheets`. Each record names its own in `sheet`."""
        return self.out / SHEETS if SHEETS in self._files else None

    @property
    def tables(self) -> tuple[Path, ...]:
        """The files of `formats`."""
        return tuple(self.out / name for name in TABLES.values() if name in self._files)

    @property
    def counts(self) -> dict[str, int]:
        """Number of images by status: `ok`, `abstained`, `unknown`, `error`."""
        return dict(self.summary["statuses"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy against `labels`; None without labels."""
        return None if self.summary["accuracy"] is None else self.summary["accuracy"]["accuracy"]
