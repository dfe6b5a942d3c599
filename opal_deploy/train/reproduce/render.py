"""A table as text, Markdown or JSON, and Fig. 4 as a chart: our metrics next to the paper's.

A cell shows its difference to the row's baseline in brackets, in percentage points, as in the paper's tables.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import UsageError
from opal_deploy.train.reproduce.plan import Column, PaperRow, TrainingPlan, official_size
from opal_deploy.train.reproduce.results import (
    Comparison,
    MeanDifference,
    average_columns,
    average_row,
    collect_metric,
    compare_cell,
    measure_averages,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_MISSING = "-"
_CHART_SUFFIXES = (".png", ".svg")
_PANELS_PER_ROW = 3
# Okabe and Ito (2008)
_OURS, _PAPER = "#0072b2", "#7f7f7f"


def to_text(plan: TrainingPlan) -> str:
    """Return the table with aligned columns, for a terminal."""
    head, rows = _table_cells(plan)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    aligned = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join([plan.table.title, "", *aligned, "", *_notes(plan)]) + "\n"


def to_markdown(plan: TrainingPlan) -> str:
    """Return the table in Markdown."""
    head, rows = _table_cells(plan)
    lines = [
        f"**{plan.table.title}**",
        "",
        _markdown_row(head),
        _markdown_row(["---"] * len(head)),
        *map(_markdown_row, rows),
        "",
    ]
    return "\n".join([*lines, *(f"- {note}" for note in _notes(plan))]) + "\n"


def to_json(plan: TrainingPlan) -> dict[str, Any]:
    """Return the table with each seed's value, metrics in per cent."""
    seeds = sorted({run.seed for run in plan.runs})
    rows = []
    for row in plan.table.rows:
        cells = []
        for column in plan.columns:
            ours, paper = collect_metric(plan, row, column), plan.table.paper_number(row, column)
            difference = compare_cell(plan, row, column)
            cells.append({
                "dataset": column.dataset,
                "metric": column.metric,
                "ours": None if ours is None else {
                    "mean": ours.mean, "std": ours.std, "values": list(ours.values),
                    "std_over_images": ours.std_over_images, "difference": difference.ours,
                },
                "paper": None if paper is None else {
                    "mean": paper.mean, "std": paper.std, "difference": difference.paper,
                },
            })  # fmt: skip
        folders = [str(run.folder) for run in plan.runs if run.row == row]
        rows.append({
            "row": row.name, "trained_here": row.run is not None, "cells": cells, "runs": folders,
            "average": asdict(average_row(plan, row)),
        })  # fmt: skip
    return {
        "table": plan.table.name,
        "title": plan.table.title,
        "seeds": seeds,
        "deviations": list(plan.deviations),
        "rows": rows,
        "averages": [asdict(average) for average in measure_averages(plan)],
    }


def _table_cells(plan: TrainingPlan) -> tuple[list[str], list[list[str]]]:
    head = ["row"]
    for column in plan.columns:
        head += [_column_title(plan, column), "paper"]
    averaged = bool(average_columns(plan))
    head += ["average", "paper"] if averaged else []
    rows = []
    for row in plan.table.rows:
        cells = [row.name]
        for column in plan.columns:
            difference = compare_cell(plan, row, column)
            paper = plan.table.paper_number(row, column)
            cells += [
                _format_ours(plan, row, column) + _format_difference(difference.ours),
                _format_number(paper.mean, paper.std) + _format_difference(difference.paper) if paper else _MISSING,
            ]
        cells += _average_cells(plan, row) if averaged else []
        rows.append(cells)
    return head, rows


def _column_title(plan: TrainingPlan, column: Column) -> str:
    metrics = {c.metric for c in plan.columns}
    return column.dataset if len(metrics) == 1 else f"{column.dataset} {column.metric}"


def _format_ours(plan: TrainingPlan, row: PaperRow, column: Column) -> str:
    measured = collect_metric(plan, row, column)
    if measured is None:
        return _MISSING
    seeds = len({run.seed for run in plan.runs})
    spread = measured.std_over_images if plan.table.spread == "images" else measured.std
    unfinished = f" ({len(measured.values)} of {seeds})" if len(measured.values) < seeds else ""
    return _format_number(measured.mean, spread) + unfinished


def _format_number(mean: float, std: float | None) -> str:
    return f"{mean:.1f}{'' if std is None else f' ± {std:.1f}'}"


def _average_cells(plan: TrainingPlan, row: PaperRow) -> list[str]:
    mean = average_row(plan, row)
    difference = Comparison(None, None) if row.baseline is None else mean - average_row(plan, row.baseline)
    return [
        _MISSING if value is None else f"{value:.2f}{_format_difference(against, 2)}"
        for value, against in ((mean.ours, difference.ours), (mean.paper, difference.paper))
    ]


def _format_difference(points: float | None, digits: int = 1) -> str:
    """Return a difference such as ` (+1.4)`; empty for None."""
    # `or 0.0`: no -0.0
    return "" if points is None else f" ({round(points, digits) or 0.0:+.{digits}f})"


def _format_average(average: MeanDifference) -> str:
    texts = [
        f"{name} {_MISSING}"
        if mean is None or not_worse is None
        else f"{name} {round(mean, 2) or 0.0:+.2f} ({not_worse:.0f} of {average.count} not worse)"
        for name, mean, not_worse in (
            ("ours", average.mean.ours, average.not_worse.ours),
            ("the paper's", average.mean.paper, average.not_worse.paper),
        )
    ]
    return f"{average.name}, mean difference: {', '.join(texts)}"


def _notes(plan: TrainingPlan) -> list[str]:
    seeds = sorted({run.seed for run in plan.runs})
    spread = (
        "mean over seeds ± standard deviation over the test images (mean over seeds)"
        if plan.table.spread == "images"
        else "mean ± standard deviation over seeds (n - 1)"
    )
    metrics = ", ".join(dict.fromkeys(column.metric for column in plan.columns))
    notes = [f"{metrics} on the test split in per cent: {spread}; seeds {', '.join(map(str, seeds))}"]
    if any(row.baseline for row in plan.table.rows):
        notes.append("in brackets: difference to the baseline in percentage points")
    notes += [_format_average(average) for average in measure_averages(plan) if average.count]
    missing = [c.dataset for c in plan.table.columns if c not in plan.columns]
    if missing:
        notes.append(f"left out, no folder given: {', '.join(dict.fromkeys(missing))} (--data NAME=FOLDER)")
    if deviations := plan.deviations:
        notes.append(f"not the paper's protocol: {'; '.join(deviations)}")
    unfinished = [run for run in plan.runs if not run.is_finished]
    if unfinished:
        notes.append(f"unfinished: {len(unfinished)} of {len(plan.runs)} runs")
    return notes


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def check_chart(plan: TrainingPlan, path: Path) -> None:
    """Raise UsageError for a table that has no figure, and for a file that is neither PNG nor SVG."""
    if not _points(plan):
        raise UsageError(f"--chart: the table {plan.table.name} has no figure; only `prototypes` has one (Fig. 4)")
    if path.suffix.lower() not in _CHART_SUFFIXES:
        raise UsageError(f"--chart {path}: expected a name that ends in {' or '.join(_CHART_SUFFIXES)}")


def draw_prototypes(plan: TrainingPlan, path: Path) -> None:
    """Draw Fig. 4: a panel per data set and their average, accuracy over m, the baseline as a dashed line.

    Bars are the standard deviation over seeds. Unfinished runs are left out.

    Raises:
        UsageError: the file cannot be written.
    """
    # the object interface: pyplot keeps global state and looks for a display
    from matplotlib.figure import Figure

    panels: list[Column | None] = [*plan.columns, *([None] if average_columns(plan) else [])]
    columns = min(_PANELS_PER_ROW, len(panels))
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
    """Return the rows by m; empty for a table that does not vary m."""
    heads = [(row, (row.run or {}).get("head", {})) for row in plan.table.rows]
    return {head["prototypes_per_class"]: row for row, head in heads if "prototypes_per_class" in head}


def _draw_panel(axes: Axes, plan: TrainingPlan, column: Column | None) -> None:
    """Draw a data set, or for None the average over the paper's data sets."""
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


def _read(plan: TrainingPlan, row: PaperRow, column: Column | None) -> tuple[Comparison, Comparison]:
    """Return means and standard deviations."""
    if column is None:
        return average_row(plan, row), Comparison(None, None)
    ours, paper = collect_metric(plan, row, column), plan.table.paper_number(row, column)
    return (
        Comparison(ours.mean if ours else None, paper.mean if paper else None),
        Comparison(ours.std if ours else None, paper.std if paper else None),
    )
