"""Train the unfinished runs of a plan, and read the metrics of the finished ones."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import write_json
from opal_deploy.datasets.cub import has_parts, read_parts
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.evaluation.parts import CONSISTENCY, STABILITY
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.logs import Progress
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.train.distributed import is_main_process
from opal_deploy.train.loop import DivergenceError, fit
from opal_deploy.train.recipe import MACHINE_OPTIONS, Recipe
from opal_deploy.train.reproduce.paper import Column, MetricName, PaperRow
from opal_deploy.train.reproduce.plan import Run, TrainingPlan
from opal_deploy.train.resume import describe_differences

PARTS_FILE = "parts.json"
# the names of part metrics in PARTS_FILE
_PART_METRICS = {"consistency": CONSISTENCY, "stability": STABILITY}


@dataclass(frozen=True)
class DatasetSource:
    """The folder of a data set, and the name to read it as; None recognizes it by its files."""

    root: Path
    dataset: str | None = None


@dataclass(frozen=True)
class MeasuredMetric:
    """A metric of our runs, in per cent.

    Attributes:
        values: one per finished seed.
        std_over_images: mean over the seeds of the standard deviation over the test images, where it is stored.
    """

    values: tuple[float, ...]
    std_over_images: float | None = None

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """The standard deviation over the seeds, with n - 1; None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def run_plan(
    plan: TrainingPlan,
    sources: Mapping[str, DatasetSource],
    *,
    report: Progress,
    log: Callable[[str], None],
) -> list[OpalError]:
    """Train the unfinished runs, and measure the parts of finished ones.

    Args:
        plan: the plan.
        sources: the source of every data set of the plan.
        report: called with images done, images in all, and a note.
        log: called with one line at a time.

    Returns:
        The errors of single runs, which did not stop the others.

    Raises:
        UsageError: a data set is wrong, or has no parts although the table is about nothing else; a finished run was
            trained with other options.
        StoppedEarly: the disk is full; the same plan can be resumed.
    """
    metrics = {column.metric for column in plan.columns}
    for run in plan.runs:
        if run.is_finished:
            _check_finished_run(run)
    todo = [run for run in plan.runs if not run.is_finished or _needs_parts(run, metrics)]
    # all data sets are checked before the first run, which takes hours
    data: dict[str, DataSet] = {}
    for name in dict.fromkeys(run.dataset for run in todo):
        data[name] = dataset = read_dataset(sources[name].root, sources[name].dataset, progress=report)
        for line in dataset.warnings:
            log(f"warning: {name}: {line}")
        log(f"{name}: read as {dataset.describe()}")
        if metrics <= _PART_METRICS.keys() and not has_parts(dataset):
            raise UsageError(
                f"{name} ({sources[name].root}): it has no part locations (CUB's parts/part_locs.txt), and the table "
                f"{plan.table.name} is about nothing else"
            )
    failures: list[OpalError] = []
    for number, run in enumerate(todo, 1):
        dataset = data[run.dataset]
        name = f"{run.dataset}, {run.row.name}, seed {run.seed}"
        log(f"run {number} of {len(todo)}: {name} ({run.folder})")
        recipe = Recipe(run.options, sources[run.dataset].dataset)
        try:
            fit(dataset, run.options, run.folder, resume=True, recipe=recipe, report=report, log=log)
            if _needs_parts(run, metrics) and has_parts(dataset) and is_main_process():
                _measure_parts(run, dataset)
        except (DivergenceError, UsageError) as error:
            failures.append(type(error)(f"{name}: {error}"))
            log(f"failed: {failures[-1]}")
    return failures


def _check_finished_run(run: Run) -> None:
    stored = run.read_stored_config()
    if stored and (differences := describe_differences(stored, {"options": asdict(run.options)}, MACHINE_OPTIONS)):
        raise UsageError(
            f"{run.folder}: it holds a finished run of other options: {'; '.join(differences)}; "
            "give the same options, another --out, or remove that folder"
        )


def collect_metric(plan: TrainingPlan, row: PaperRow, column: Column) -> MeasuredMetric | None:
    """Return a metric over a row's finished runs; None where no run is finished."""
    values, spreads = [], []
    for run in plan.runs:
        if run.row != row or run.dataset != column.dataset or not run.is_finished:
            continue
        value, spread = _read_metric(run, column.metric)
        if value is not None:
            values.append(value)
        if spread is not None:
            spreads.append(spread)
    if not values:
        return None
    return MeasuredMetric(tuple(values), statistics.fmean(spreads) if spreads else None)


def _read_metric(run: Run, name: MetricName) -> tuple[float | None, float | None]:
    """Return a run's metric and its standard deviation over images, both in per cent."""
    if name in _PART_METRICS:
        path = run.folder / PARTS_FILE
        return _read_number(_read_json(path), _PART_METRICS[name], path), None
    path = run.files.summary
    summary = _read_json(path)
    key = {"accuracy": "test_accuracy", "collapse": "spatial_prototype_collapse"}[name]
    value = _read_number(summary, key, path)
    spread = _read_number(summary, "spatial_prototype_collapse_std", path) if name == "collapse" else None
    return (None if value is None else 100.0 * value), (None if spread is None else 100.0 * spread)


def _needs_parts(run: Run, metrics: set[MetricName]) -> bool:
    if not metrics & _PART_METRICS.keys() or run.options.head.evidence == "none":
        return False
    return not (run.folder / PARTS_FILE).is_file()


def _measure_parts(run: Run, data: DataSet) -> None:
    session = TorchSession(run.files.best, device=run.options.device)
    result = evaluate_session(session, data.test, batch=32, parts=read_parts(data.root, data.test))
    write_json(run.folder / PARTS_FILE, result.parts.to_dict() if result.parts else {})


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable ({error}); remove its folder and reproduce again") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: not the metrics of a run; remove its folder and reproduce again")
    return document


def _read_number(document: dict[str, Any], name: str, path: Path) -> float | None:
    value = document.get(name)
    if value is None or (isinstance(value, int | float) and math.isfinite(value)):
        return value
    raise UsageError(f"{path}: {name} is {value!r}, not a finite number; remove its folder and reproduce again")
