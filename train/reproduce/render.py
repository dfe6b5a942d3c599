"""A table as text, Markdown or JSON, our metrics beside the paper's."""

from __future__ import annotations

from typing import Any

from opal_deploy.train.reproduce.paper import Column, PaperNumber
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
            cells.append({
                "dataset": column.dataset,
                "figure": column.metric,
                "ours": None if ours is None else {
                    "mean": ours.mean, "std": ours.std, "values": list(ours.values),
                    "std_over_pictures": ours.std_over_images,
                },
                "paper": None if paper is None else {"mean": paper.mean, "std": paper.std},
            })  # fmt: skip
        folders = [str(run.folder) for run in plan.runs if run.row == row]
        rows.append({"row": row.name, "trained_here": row.run is not None, "cells": cells, "runs": folders})
    return {
        "table": plan.table.name,
        "title": plan.table.title,
        "seeds": seeds,
        "departures": list(plan.deviations),
        "rows": rows,
    }


def _table_cells(plan: TrainingPlan) -> tuple[list[str], list[list[str]]]:
    head = ["row"]
    for column in plan.columns:
        head += [_column_title(plan, column), "paper"]
    rows = []
    for row in plan.table.rows:
        cells = [row.name]
        for column in plan.columns:
            cells += [
                _format_ours(plan, collect_metric(plan, row, column)),
                _format_paper(plan.table.paper_number(row, column)),
            ]
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


def _notes(plan: TrainingPlan) -> list[str]:
    seeds = sorted({run.seed for run in plan.runs})
    spread = (
        "mean over seeds ± standard deviation over the test images (mean over seeds)"
        if plan.table.spread == "images"
        else "mean ± standard deviation over seeds (n - 1)"
    )
    metrics = ", ".join(dict.fromkeys(column.metric for column in plan.columns))
    notes = [f"{metrics} in per cent of the test split: {spread}; seeds {', '.join(map(str, seeds))}"]
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
