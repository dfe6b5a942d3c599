"""Train the unfinished runs of a plan; read the metrics of finished ones, and compare them with the paper's.

All numbers are in per cent or percentage points. Our mean and the paper's are over the same columns, the paper's
columns in the plan. A mean is known once all of them are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from opal_deploy.artifact.files import is_finite_number, read_json, write_json
from opal_deploy.datasets.cub import has_parts, read_parts
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.evaluation.parts import CONSISTENCY, STABILITY
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.logs import Log, Progress, WarningLine
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.train.loop import DivergenceError, fit
from opal_deploy.train.machine import is_main_process
from opal_deploy.train.recipe import MACHINE_OPTIONS, Recipe
from opal_deploy.train.reproduce.plan import Column, MetricName, PaperRow, Run, TrainingPlan
from opal_deploy.train.resume import describe_differences

PARTS_FILE = "parts.json"
# the names of part metrics in PARTS_FILE
_PART_METRICS = {"consistency": CONSISTENCY, "stability": STABILITY}


@dataclass(frozen=True)
class DatasetSource:
    """The folder of a data set, and the name to read it as; None recognizes the data set by its files."""

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
    progress: Progress,
    log: Log,
) -> list[OpalError]:
    """Train the unfinished runs, and measure the parts of finished ones.

    Args:
        plan: the plan.
        sources: the source of every data set of the plan.
        progress: called with images done, all images, and a note.
        log: called with one line at a time.

    Returns:
        The errors of the runs that failed; the others go on.

    Raises:
        UsageError: a data set is wrong, or has no parts for a table about parts only; a finished run was trained with
            other options.
        StoppedEarly: the disk is full; the same plan can be resumed.
    """
    metrics = {column.metric for column in plan.columns}
    for run in plan.runs:
        stored = run.read_stored_config() if run.is_finished else {}
        if stored and (differences := describe_differences(stored, {"options": asdict(run.options)}, MACHINE_OPTIONS)):
            raise UsageError(
                f"{run.folder}: holds a finished run with other options: {'; '.join(differences)}; "
                "give the same options, another --out, or remove that folder"
            )
    todo = [run for run in plan.runs if not run.is_finished or _needs_parts(run, metrics)]
    # all data sets are checked before the first run, which takes hours
    data: dict[str, DataSet] = {}
    for name in dict.fromkeys(run.dataset for run in todo):
        data[name] = dataset = read_dataset(sources[name].root, sources[name].dataset, progress=progress)
        for line in dataset.warnings:
            log(WarningLine(f"warning: {name}: {line}"))
        log(f"{name}: read as {dataset.describe()}")
        if metrics <= _PART_METRICS.keys() and not has_parts(dataset):
            raise UsageError(
                f"{name} ({sources[name].root}): the table {plan.table.name} needs part locations (CUB's "
                "parts/part_locs.txt), and there are none; give CUB's folder, or choose another table"
            )
    failures: list[OpalError] = []
    for number, run in enumerate(todo, 1):
        dataset = data[run.dataset]
        name = f"{run.dataset}, {run.row.name}, seed {run.seed}"
        log(f"run {number} of {len(todo)}: {name} ({run.folder})")
        recipe = Recipe(run.options, sources[run.dataset].dataset)
        try:
            fit(dataset, run.options, run.folder, resume=True, recipe=recipe, progress=progress, log=log)
            if _needs_parts(run, metrics) and has_parts(dataset) and is_main_process():
                _measure_parts(run, dataset)
        except (DivergenceError, UsageError) as error:
            failures.append(type(error)(f"{name}: {error}"))
            log(f"failed: {failures[-1]}")
    return failures


def collect_metric(plan: TrainingPlan, row: PaperRow, column: Column) -> MeasuredMetric | None:
    """Return a metric over a row's finished runs; None without any."""
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
        return _read_figure(run.folder / PARTS_FILE, _PART_METRICS[name]), None
    key = {"accuracy": "test_accuracy", "collapse": "spatial_prototype_collapse"}[name]
    value = _read_figure(run.files.summary, key)
    spread = _read_figure(run.files.summary, f"{key}_std") if name == "collapse" else None
    return (None if value is None else 100.0 * value), (None if spread is None else 100.0 * spread)


def _needs_parts(run: Run, metrics: set[MetricName]) -> bool:
    if not metrics & _PART_METRICS.keys() or run.options.head.evidence == "none":
        return False
    return not (run.folder / PARTS_FILE).is_file()


def _measure_parts(run: Run, data: DataSet) -> None:
    session = TorchSession(run.files.best, device=run.options.device)
    result = evaluate_session(session, data.test, batch=32, parts=read_parts(data.root, data.test))
    write_json(run.folder / PARTS_FILE, result.parts.to_dict() if result.parts else {})


def _read_figure(path: Path, key: str) -> float | None:
    """Return a number in a JSON file of a run; None without such a file or number."""
    if not path.is_file():
        return None
    try:
        document = read_json(path)
        value: float | None = document.get(key) if isinstance(document, dict) else math.nan
        if value is not None and not is_finite_number(value):
            raise ValueError(f"{key} is not a number")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable ({error}); remove its folder and reproduce again") from None
    return value


@dataclass(frozen=True)
class Comparison:
    """Our number and the paper's; None where unknown."""

    ours: float | None
    paper: float | None

    def __sub__(self, other: Comparison) -> Comparison:
        return Comparison(_subtract(self.ours, other.ours), _subtract(self.paper, other.paper))


@dataclass(frozen=True)
class MeanDifference:
    """A mean difference over `count` pairs of rows and columns.

    Attributes:
        name: what is compared with what.
        mean: the mean.
        not_worse: number of differences of at least 0 at the paper's printed digit.
        count: number of differences.
    """

    name: str
    mean: Comparison
    not_worse: Comparison
    count: int


def compare_cell(plan: TrainingPlan, row: PaperRow, column: Column) -> Comparison:
    """Return a row's difference to its baseline in a column."""
    if row.baseline is None:
        return Comparison(None, None)
    return _cell(plan, row, column) - _cell(plan, row.baseline, column)


def average_columns(plan: TrainingPlan) -> tuple[Column, ...]:
    """Return the paper's columns in the plan, over which rows are averaged.

    Empty for a single data set, different metrics, and tables without a baseline, where the paper does not average.
    """
    columns = tuple(column for column in plan.columns if column in plan.table.columns)
    comparable = len({column.metric for column in columns}) == 1 and any(row.baseline for row in plan.table.rows)
    return columns if comparable and len(columns) > 1 else ()


def average_row(plan: TrainingPlan, row: PaperRow) -> Comparison:
    """Return a row's mean over `average_columns`."""
    return _combine([_cell(plan, row, column) for column in average_columns(plan)], statistics.fmean)


def measure_averages(plan: TrainingPlan) -> list[MeanDifference]:
    """Return the averages of the paper's text, over the columns that are in the plan."""
    columns = [column for column in plan.columns if column in plan.table.columns]
    measured = []
    for average in plan.table.averages:
        cells = [
            _cell(plan, row, column) - _cell(plan, other, column) for row, other in average.pairs for column in columns
        ]
        not_worse = _combine(cells, lambda values: float(sum(round(value, 1) >= 0 for value in values)))
        measured.append(MeanDifference(average.name, _combine(cells, statistics.fmean), not_worse, len(cells)))
    return measured


def _cell(plan: TrainingPlan, row: PaperRow, column: Column) -> Comparison:
    ours, paper = collect_metric(plan, row, column), plan.table.paper_number(row, column)
    return Comparison(None if ours is None else ours.mean, None if paper is None else paper.mean)


def _combine(cells: list[Comparison], combine: Callable[[list[float]], float]) -> Comparison:
    ours = [cell.ours for cell in cells if cell.ours is not None]
    paper = [cell.paper for cell in cells if cell.paper is not None]
    return Comparison(
        combine(ours) if cells and len(ours) == len(cells) else None,
        combine(paper) if cells and len(paper) == len(cells) else None,
    )


def _subtract(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
