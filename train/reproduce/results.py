"""Doing a plan's runs, those that are missing, and reading the figures of those that are there."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import write_json
from opal_deploy.datasets.cub import has_parts
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, ProgressCallback
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.evaluation.attention_maps import CONSISTENCY, STABILITY
from opal_deploy.evaluation.parts import measure_parts
from opal_deploy.model.checkpoint import load
from opal_deploy.train.distributed import is_main_process
from opal_deploy.train.loop import DivergenceError, fit
from opal_deploy.train.recipe import CHANGEABLE_ON_RESUME, Recipe
from opal_deploy.train.reproduce.paper import Column, FigureName, Row
from opal_deploy.train.reproduce.plan import Plan, Run
from opal_deploy.train.resume import describe_differences

PARTS_FILE = "parts.json"
# our names of the figures in PARTS_FILE
_PART_FIGURES = {"consistency": CONSISTENCY, "stability": STABILITY}


@dataclass(frozen=True)
class DatasetSource:
    """Where a data set is, and how it is read."""

    root: Path
    dataset: str | None = None


@dataclass(frozen=True)
class MeasuredFigure:
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


def run_plan(
    plan: Plan,
    sources: Mapping[str, DatasetSource],
    *,
    report: ProgressCallback,
    log: Callable[[str], None],
) -> list[OpalError]:
    """Train what is not finished, measure what is not measured.

    Args:
        sources: of every data set of the plan.

    Returns:
        What went wrong with single runs, each named; the others were done nevertheless.

    Raises:
        UsageError: a data set is wrong, or has no parts where nothing else is asked for; a finished run was begun with
            other options. StoppedEarly: the disk is full. All can be resumed.
    """
    wanted = {column.figure for column in plan.columns}
    for run in plan.runs:
        if run.is_finished:
            _check_finished_run(run)
    todo = [run for run in plan.runs if not run.is_finished or _needs_parts(run, wanted)]
    # before the first run of hours, whatever is wrong with the last data set
    data: dict[str, DataSet] = {}
    for name in dict.fromkeys(run.dataset for run in todo):
        data[name] = read_dataset(sources[name].root, sources[name].dataset, report=report)
        for line in data[name].warnings:
            log(f"warning: {name}: {line}")
        log(f"{name}: read as {data[name].describe()}")
        if wanted <= _PART_FIGURES.keys() and not has_parts(data[name]):
            raise UsageError(
                f"{name} ({sources[name].root}): it has no part locations (CUB's parts/part_locs.txt), and the table "
                f"{plan.table.name} is about nothing else"
            )
    failures: list[OpalError] = []
    for number, run in enumerate(todo, 1):
        pictures = data[run.dataset]
        name = f"{run.dataset}, {run.row.name}, seed {run.seed}"
        log(f"run {number} of {len(todo)}: {name} ({run.folder})")
        recipe = Recipe(run.options, sources[run.dataset].dataset)
        try:
            fit(pictures, run.options, run.folder, resume=True, recipe=recipe, report=report, log=log)
            if _needs_parts(run, wanted) and has_parts(pictures) and is_main_process():
                _measure_parts(run, pictures)
        except (DivergenceError, UsageError) as error:
            failures.append(type(error)(f"{name}: {error}"))
            log(f"failed: {failures[-1]}")
    return failures


def _check_finished_run(run: Run) -> None:
    stored = run.stored()
    wanted = {"options": asdict(run.options)}
    free = tuple(name for name in CHANGEABLE_ON_RESUME if name != "epochs")
    if stored and (differences := describe_differences(stored, wanted, free)):
        raise UsageError(
            f"{run.folder}: it holds a finished run of other options: {'; '.join(differences)}; "
            "give the same options, another --out, or remove that folder"
        )


def collect_figures(plan: Plan, row: Row, column: Column) -> MeasuredFigure | None:
    """The figures of a row's finished runs; None where there is none yet."""
    values, spreads = [], []
    for run in plan.runs:
        if run.row != row or run.dataset != column.dataset or not run.is_finished:
            continue
        value, spread = _read_figure(run, column.figure)
        if value is not None:
            values.append(value)
        if spread is not None:
            spreads.append(spread)
    if not values:
        return None
    return MeasuredFigure(tuple(values), statistics.fmean(spreads) if spreads else None)


def _read_figure(run: Run, name: FigureName) -> tuple[float | None, float | None]:
    """A run's figure in per cent, and its spread over pictures."""
    if name in _PART_FIGURES:
        path = run.folder / PARTS_FILE
        return _read_number(_read_json(path), _PART_FIGURES[name], path), None
    path = run.files.summary
    summary = _read_json(path)
    key = {"accuracy": "test_accuracy", "collapse": "spatial_prototype_collapse"}[name]
    value = _read_number(summary, key, path)
    spread = _read_number(summary, "spatial_prototype_collapse_std", path) if name == "collapse" else None
    return (None if value is None else 100.0 * value), (None if spread is None else 100.0 * spread)


def _needs_parts(run: Run, wanted: set[FigureName]) -> bool:
    if not wanted & _PART_FIGURES.keys() or run.options.head.evidence == "none":
        return False
    return not (run.folder / PARTS_FILE).is_file()


def _measure_parts(run: Run, pictures: DataSet) -> None:
    found = measure_parts(load(run.files.best).network, pictures)
    write_json(run.folder / PARTS_FILE, found.to_dict())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable ({error}); remove its folder and reproduce again") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: not the figures of a run; remove its folder and reproduce again")
    return found


def _read_number(found: dict[str, Any], name: str, path: Path) -> float | None:
    value = found.get(name)
    if value is None or (isinstance(value, int | float) and math.isfinite(value)):
        return value
    raise UsageError(f"{path}: {name} is {value!r}, no figure; remove its folder and reproduce again")
