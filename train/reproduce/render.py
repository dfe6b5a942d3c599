"""A table for people and for programs: ours beside the paper's."""

from __future__ import annotations

from typing import Any

from opal_deploy.train.reproduce.paper import Column, PaperFigure
from opal_deploy.train.reproduce.plan import Plan
from opal_deploy.train.reproduce.results import MeasuredFigure, collect_figures

_NOTHING = "-"


def to_text(plan: Plan) -> str:
    """Aligned columns for a terminal."""
    head, rows = _table_cells(plan)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    aligned = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join([plan.table.title, "", *aligned, "", *_notes(plan)]) + "\n"


def to_markdown(plan: Plan) -> str:
    """A table that Markdown readers draw."""
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


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything, with each seed's value; figures in per cent."""
    seeds = sorted({run.seed for run in plan.runs})
    rows = []
    for row in plan.table.rows:
        cells = []
        for column in plan.columns:
            ours, printed = collect_figures(plan, row, column), plan.table.printed(row, column)
            cells.append({
                "dataset": column.dataset,
                "figure": column.figure,
                "ours": None if ours is None else {
                    "mean": ours.mean, "std": ours.std, "values": list(ours.values),
                    "std_over_pictures": ours.over_pictures,
                },
                "paper": None if printed is None else {"mean": printed.mean, "std": printed.std},
            })  # fmt: skip
        folders = [str(run.folder) for run in plan.runs if run.row == row]
        rows.append({"row": row.name, "trained_here": row.run is not None, "cells": cells, "runs": folders})
    return {
        "table": plan.table.name,
        "title": plan.table.title,
        "seeds": seeds,
        "departures": list(plan.departures),
        "rows": rows,
    }


def _table_cells(plan: Plan) -> tuple[list[str], list[list[str]]]:
    head = ["row"]
    for column in plan.columns:
        head += [_column_title(plan, column), "paper"]
    rows = []
    for row in plan.table.rows:
        cells = [row.name]
        for column in plan.columns:
            cells += [
                _format_ours(plan, collect_figures(plan, row, column)),
                _format_paper(plan.table.printed(row, column)),
            ]
        rows.append(cells)
    return head, rows


def _column_title(plan: Plan, column: Column) -> str:
    figures = {c.figure for c in plan.columns}
    return column.dataset if len(figures) == 1 else f"{column.dataset} {column.figure}"


def _format_ours(plan: Plan, found: MeasuredFigure | None) -> str:
    if found is None:
        return _NOTHING
    seeds = len({run.seed for run in plan.runs})
    spread = found.over_pictures if plan.table.spread == "pictures" else found.std
    short = f" ({len(found.values)} of {seeds})" if len(found.values) < seeds else ""
    return f"{found.mean:.1f}{'' if spread is None else f' ± {spread:.1f}'}{short}"


def _format_paper(printed: PaperFigure | None) -> str:
    if printed is None:
        return _NOTHING
    return f"{printed.mean:.1f}{'' if printed.std is None else f' ± {printed.std:.1f}'}"


def _notes(plan: Plan) -> list[str]:
    seeds = sorted({run.seed for run in plan.runs})
    over = (
        "mean over seeds ± standard deviation over the test pictures (mean over seeds)"
        if plan.table.spread == "pictures"
        else "mean ± standard deviation over seeds (n - 1)"
    )
    figures = ", ".join(dict.fromkeys(column.figure for column in plan.columns))
    notes = [f"{figures} in per cent of the test split: {over}; seeds {', '.join(map(str, seeds))}"]
    missing = [c.dataset for c in plan.table.columns if c not in plan.columns]
    if missing:
        notes.append(f"without a folder, left out: {', '.join(dict.fromkeys(missing))} (--data NAME=FOLDER)")
    if departures := plan.departures:
        notes.append(f"not the paper's protocol: {'; '.join(departures)}")
    unfinished = [run for run in plan.runs if not run.is_finished]
    if unfinished:
        notes.append(f"{len(unfinished)} of {len(plan.runs)} runs are not finished")
    return notes


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
