"""Differences to a row's baseline, and the averages that the paper's text prints, ours beside the paper's.

All numbers are in percentage points. A mean is over the same columns for ours and the paper's: those of the paper's
table that are in the plan; it is known once every one of them is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opal_deploy.train.reproduce.paper import Column, PaperAverage, PaperRow
from opal_deploy.train.reproduce.plan import TrainingPlan
from opal_deploy.train.reproduce.results import collect_metric


@dataclass(frozen=True)
class Beside:
    """Our number and the paper's; None where one is not known."""

    ours: float | None
    paper: float | None

    def __sub__(self, other: Beside) -> Beside:
        return Beside(_subtract(self.ours, other.ours), _subtract(self.paper, other.paper))


@dataclass(frozen=True)
class MeanDifference:
    """A mean difference over rows and columns.

    Attributes:
        name: what is compared with what.
        mean: the mean; `count` differences of ours or the paper's.
        not_worse: how many of the differences are at least 0 at the digit that the paper prints.
        count: number of differences.
    """

    name: str
    mean: Beside
    not_worse: Beside
    count: int


def compare_cell(plan: TrainingPlan, row: PaperRow, column: Column) -> Beside:
    """Return a row's difference to its baseline in a column."""
    if row.baseline is None:
        return Beside(None, None)
    return _cell(plan, row, column) - _cell(plan, row.baseline, column)


def average_columns(plan: TrainingPlan) -> tuple[Column, ...]:
    """Return the columns that rows are averaged over: those of the paper's in the plan; none where that means nothing.

    It means nothing over a single data set, over different metrics, and in tables without a baseline, where the paper
    does not average either.
    """
    columns = tuple(column for column in plan.columns if column in plan.table.columns)
    comparable = len({column.metric for column in columns}) == 1 and any(row.baseline for row in plan.table.rows)
    return columns if comparable and len(columns) > 1 else ()


def average_row(plan: TrainingPlan, row: PaperRow) -> Beside:
    """Return a row's mean over `average_columns`."""
    return _mean(_cell(plan, row, column) for column in average_columns(plan))


def measure_averages(plan: TrainingPlan) -> list[MeanDifference]:
    """Return the averages of the paper's text, over the columns that are in the plan."""
    return [_measure_average(plan, average) for average in plan.table.averages]


def _measure_average(plan: TrainingPlan, average: PaperAverage) -> MeanDifference:
    columns = [column for column in plan.columns if column in plan.table.columns]
    cells = [
        _cell(plan, row, column) - _cell(plan, other, column) for row, other in average.pairs for column in columns
    ]
    not_worse = _combine(cells, lambda values: float(sum(round(value, 1) >= 0 for value in values)))
    return MeanDifference(average.name, _mean(cells), not_worse, len(cells))


def _cell(plan: TrainingPlan, row: PaperRow, column: Column) -> Beside:
    ours, paper = collect_metric(plan, row, column), plan.table.paper_number(row, column)
    return Beside(None if ours is None else ours.mean, None if paper is None else paper.mean)


def _mean(cells: Iterable[Beside]) -> Beside:
    return _combine(list(cells), statistics.fmean)


def _combine(cells: list[Beside], combine: Callable[[list[float]], float]) -> Beside:
    ours = [cell.ours for cell in cells if cell.ours is not None]
    paper = [cell.paper for cell in cells if cell.paper is not None]
    return Beside(
        combine(ours) if cells and len(ours) == len(cells) else None,
        combine(paper) if cells and len(paper) == len(cells) else None,
    )


def _subtract(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
