"""A table as text, Markdown or JSON, our metrics beside the paper's.

A cell's difference to the row's baseline stands in brackets behind it, in percentage points, as in the paper's tables.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from opal_deploy.train.reproduce.averages import (
    Beside,
    MeanDifference,
    average_columns,
    average_row,
    compare_cell,
    measure_averages,
)
from opal_deploy.train.reproduce.paper import Column, PaperNumber, PaperRow
from opal_deploy.train.reproduce.plan import TrainingPlan
from opal_deploy.train.reproduce.results import MeasuredMetric, collect_metric

_MISSING = "-"


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
                "figure": column.metric,
                "ours": None if ours is None else {
                    "mean": ours.mean, "std": ours.std, "values": list(ours.values),
                    "std_over_pictures": ours.std_over_images, "difference": difference.ours,
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
        "departures": list(plan.deviations),
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
            cells += [
                _format_ours(plan, collect_metric(plan, row, column)) + _format_difference(difference.ours),
                _format_paper(plan.table.paper_number(row, column)) + _format_difference(difference.paper),
            ]
        cells += _average_cells(plan, row) if averaged else []
        rows.append(cells)
    return head, rows


def _column_title(plan: TrainingPlan, column: Column) -> str:
    metrics = {c.metric for c in plan.columns}
    return column.dataset if len(metrics) == 1 else f"{column.dataset} {column.metric}"


def _format_ours(plan: TrainingPlan, measured: MeasuredMetric | None) -> str:
    if measured is None:
        return _MISSING
    seeds = len({run.seed for run in plan.runs})
    spread = measured.std_over_images if plan.table.spread == "images" else measured.std
    unfinished = f" ({len(measured.values)} of {seeds})" if len(measured.values) < seeds else ""
    return f"{measured.mean:.1f}{'' if spread is None else f' ± {spread:.1f}'}{unfinished}"


def _format_paper(paper: PaperNumber | None) -> str:
    if paper is None:
        return _MISSING
    return f"{paper.mean:.1f}{'' if paper.std is None else f' ± {paper.std:.1f}'}"


def _average_cells(plan: TrainingPlan, row: PaperRow) -> list[str]:
    mean = average_row(plan, row)
    difference = Beside(None, None) if row.baseline is None else mean - average_row(plan, row.baseline)
    return [
        _MISSING if value is None else f"{value:.2f}{_format_difference(against, 2)}"
        for value, against in ((mean.ours, difference.ours), (mean.paper, difference.paper))
    ]


def _format_difference(points: float | None, digits: int = 1) -> str:
    """Return ` (+1.4)`; empty where there is no difference to print."""
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
    notes = [f"{metrics} in per cent of the test split: {spread}; seeds {', '.join(map(str, seeds))}"]
    if any(row.baseline for row in plan.table.rows):
        notes.append("in brackets the difference to the baseline in percentage points")
    notes += [_format_average(average) for average in measure_averages(plan) if average.count]
    missing = [c.dataset for c in plan.table.columns if c not in plan.columns]
    if missing:
        notes.append(f"without a folder, left out: {', '.join(dict.fromkeys(missing))} (--data NAME=FOLDER)")
    if deviations := plan.deviations:
        notes.append(f"not the paper's protocol: {'; '.join(deviations)}")
    unfinished = [run for run in plan.runs if not run.is_finished]
    if unfinished:
        notes.append(f"{len(unfinished)} of {len(plan.runs)} runs are not finished")
    return notes


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
