"""Doing a plan's runs, those that are missing, and reading the figures of those that are there."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import written_atomically
from opal_deploy.errors import UsageError
from opal_deploy.model.checkpoint import load
from opal_deploy.train.data.catalogue import read
from opal_deploy.train.data.samples import DataSet
from opal_deploy.train.evaluation.maps import CONSISTENCY, STABILITY
from opal_deploy.train.evaluation.parts import measure_parts
from opal_deploy.train.loop import Diverged, fit
from opal_deploy.train.pictures import Report
from opal_deploy.train.recipe import Recipe
from opal_deploy.train.reproduce.paper import Column, FigureName, Row
from opal_deploy.train.reproduce.plan import Plan, Run

PARTS_FILE = "parts.json"
# our names of the figures in PARTS_FILE
_PART_FIGURES = {"consistency": CONSISTENCY, "stability": STABILITY}


@dataclass(frozen=True)
class Source:
    """Where a data set is, and how it is read."""

    root: Path
    dataset: str | None = None


@dataclass(frozen=True)
class Measured:
    """What our runs say, in per cent.

    Attributes:
        values: one a finished seed.
        mean: of them.
        std: over them, with n - 1; None for a single one.
        over_pictures: mean over the seeds of the standard deviation over the test pictures, where it is kept.
    """

    values: tuple[float, ...]
    over_pictures: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def carry_out(
    plan: Plan,
    sources: Mapping[str, Source],
    *,
    report: Report,
    log: Callable[[str], None],
) -> list[str]:
    """Train what is not finished, measure what is not measured.

    Args:
        sources: of every data set of the plan.

    Returns:
        One line for each run that diverged.

    Raises:
        UsageError: a data set or an option is wrong, or a folder holds a run of other options.
        StoppedEarly: the disk is full. All can be resumed.
    """
    wanted = {column.figure for column in plan.columns}
    data: dict[str, DataSet] = {}
    failures = []
    for number, run in enumerate(plan.runs, 1):
        needs_parts = _needs_parts(run, wanted)
        if run.is_finished and not needs_parts:
            continue
        source = sources[run.dataset]
        if run.dataset not in data:
            data[run.dataset] = read(source.root, source.dataset)
            for line in data[run.dataset].warnings:
                log(f"warning: {run.dataset}: {line}")
        pictures = data[run.dataset]
        log(f"run {number} of {len(plan.runs)}: {run.dataset}, {run.row.name}, seed {run.seed} ({run.folder})")
        recipe = Recipe(run.options, source.dataset)
        try:
            fit(pictures, run.options, run.folder, resume=True, recipe=recipe, report=report, log=log)
        except Diverged as error:
            failures.append(f"{run.dataset}, {run.row.name}, seed {run.seed}: {error}")
            log(f"failed: {failures[-1]}")
            continue
        if needs_parts:
            _measure(run, pictures)
    return failures


def gather(plan: Plan, row: Row, column: Column) -> Measured | None:
    """The figures of a row's finished runs; None where there is none yet."""
    values, spreads = [], []
    for run in plan.runs:
        if run.row is row or run.row == row:
            if run.dataset != column.dataset or not run.is_finished:
                continue
            value, spread = _figure(run, column.figure)
            if value is not None:
                values.append(value)
            if spread is not None:
                spreads.append(spread)
    if not values:
        return None
    return Measured(tuple(values), statistics.fmean(spreads) if spreads else None)


def _figure(run: Run, name: FigureName) -> tuple[float | None, float | None]:
    """A run's figure in per cent, and its spread over pictures."""
    if name in _PART_FIGURES:
        found = _read_json(run.folder / PARTS_FILE)
        value = found.get(_PART_FIGURES[name])
        return (None if value is None else float(value)), None
    summary = _read_json(run.folder / "summary.json")
    key = {"accuracy": "test_accuracy", "collapse": "spatial_prototype_collapse"}[name]
    value = summary.get(key)
    spread = summary.get("spatial_prototype_collapse_std") if name == "collapse" else None
    return (
        None if value is None or math.isnan(value) else 100.0 * float(value),
        None if spread is None else 100.0 * float(spread),
    )


def _needs_parts(run: Run, wanted: set[FigureName]) -> bool:
    if not wanted & _PART_FIGURES.keys() or run.options.head.evidence == "none":
        return False
    return not (run.folder / PARTS_FILE).is_file()


def _measure(run: Run, pictures: DataSet) -> None:
    found = measure_parts(load(run.folder / "best.pt").network, pictures)
    with written_atomically(run.folder / PARTS_FILE) as temporary:
        temporary.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable ({error}); remove its folder and reproduce again") from None
    return found
