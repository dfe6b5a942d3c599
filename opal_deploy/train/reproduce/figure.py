"""Fig. 4 of the paper: accuracy over the number of prototypes per class, ours beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import UsageError
from opal_deploy.train.reproduce.averages import Beside, average_columns, average_row
from opal_deploy.train.reproduce.paper import Column, PaperRow
from opal_deploy.train.reproduce.plan import TrainingPlan, official_size
from opal_deploy.train.reproduce.results import collect_metric

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_COLUMNS = 3
# Okabe and Ito (2008)
_OURS, _PAPER = "#0072b2", "#7f7f7f"


def check_chart(plan: TrainingPlan, path: Path) -> None:
    """Raise UsageError for a table that has no figure, and for a file that is neither PNG nor SVG."""
    if not _points(plan):
        raise UsageError(f"--chart: the table {plan.table.name} has no figure; only `prototypes` has one (Fig. 4)")
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--chart {path}: expected a name that ends in {' or '.join(SUFFIXES)}")


def draw_prototypes(plan: TrainingPlan, path: Path) -> None:
    """Write a panel for each data set, and one for their average: accuracy over m, the baseline as a dashed line.

    Bars are the standard deviation over seeds. What is not trained yet is left out.

    Raises:
        UsageError: the file cannot be written.
    """
    # the object interface: pyplot keeps global state and looks for a display
    from matplotlib.figure import Figure

    panels: list[Column | None] = [*plan.columns, *([None] if average_columns(plan) else [])]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.0 * columns, 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, column in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, plan, column)
    entries: dict[str, Artist] = {}
    for axes in grid.flat:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=len(entries), frameon=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix.lower().removeprefix("."))


def _points(plan: TrainingPlan) -> dict[int, PaperRow]:
    """Return the rows of different m, by m; none in a table that does not vary it."""
    heads = {row.name: (row.run or {}).get("head", {}) for row in plan.table.rows}
    return {
        heads[row.name]["prototypes_per_class"]: row
        for row in plan.table.rows
        if "prototypes_per_class" in heads[row.name]
    }


def _draw_panel(axes: Axes, plan: TrainingPlan, column: Column | None) -> None:
    """Draw a data set, or the average over the paper's for None."""
    points = _points(plan)
    baseline = next(row.baseline for row in points.values())
    numbers = {m: _read(plan, row, column) for m, row in points.items()}
    for side, label, color in (("paper", "paper", _PAPER), ("ours", "ours", _OURS)):
        found = {m: getattr(mean, side) for m, (mean, _) in numbers.items() if getattr(mean, side) is not None}
        if found:
            bars = [getattr(numbers[m][1], side) or 0.0 for m in found]
            axes.errorbar(
                list(found), list(found.values()), yerr=bars, marker="o", capsize=3, color=color, label=f"OPAL, {label}"
            )
        level = None if baseline is None else getattr(_read(plan, baseline, column)[0], side)
        if level is not None:
            axes.axhline(level, linestyle="--", color=color, label=f"baseline, {label}")
    size = None if column is None else official_size(column.dataset)
    axes.set_title("average" if column is None else column.dataset if size is None else size.title)
    axes.set_xticks(list(points))
    axes.set_xlabel("prototypes per class, m")
    axes.set_ylabel("accuracy [%]")
    axes.grid(alpha=0.3)


def _read(plan: TrainingPlan, row: PaperRow, column: Column | None) -> tuple[Beside, Beside]:
    """Return means and standard deviations."""
    if column is None:
        return average_row(plan, row), Beside(None, None)
    ours, paper = collect_metric(plan, row, column), plan.table.paper_number(row, column)
    return (
        Beside(ours.mean if ours else None, paper.mean if paper else None),
        Beside(ours.std if ours else None, paper.std if paper else None),
    )
