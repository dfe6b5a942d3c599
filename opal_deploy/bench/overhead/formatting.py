"""The overhead table for people and machines: text, Markdown, CSV, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from opal_deploy.bench.overhead.operations import Operation, Shape, evaluate, evaluate_operations, head_title
from opal_deploy.bench.overhead.paper import Cell
from opal_deploy.bench.overhead.table import CONVENTIONS, SHARES, OverheadTable, Row, summarise
from opal_deploy.bench.tables import csv_table, format_fixed, format_table

_HEADER = (
    "backbone", "params", "paper GFLOPs", "true GFLOPs", "classes",
    "linear params", "paper GFLOPs", "true GFLOPs",
    "{head} params", "paper GFLOPs", "true GFLOPs", "params %", "paper %", "true %",
)  # fmt: skip
_STRIDE_HEADER = (
    "backbone", "classes", "stride", "cells", "backbone GFLOPs", "head GFLOPs", "together", "% of operations",
    "% of parameters",
)  # fmt: skip
_COUNTS = ("params", "paper", "macs", "flops")
# heads with a table of operations
_TABULATED = ("linear", "opal")
# of the paper's nine backbones, whose names stand alone
_PAPER_STRIDE = 32
_SHARE_TITLES = {"params": "parameters", "paper": "operations, paper's convention", "flops": "true FLOPs"}


def format_classes(number: int) -> str:
    """Return the name of a number of classes that belongs to no data set of the paper's."""
    return f"{number} classes"


def format_count(value: int) -> str:
    """Return a count as the paper writes it: 409.8k, 2.049M, 23.51M."""
    if value >= 10_000_000:
        return f"{format_fixed(value, 10**6, 2)}M"
    return f"{format_fixed(value, 10**6, 3)}M" if value >= 1_000_000 else f"{format_fixed(value, 10**3, 1)}k"


def to_csv(table: OverheadTable) -> str:
    """Return one line per backbone and number of classes; counts are whole numbers, shares are in %."""
    rows = [_flatten(row) for row in table.rows]
    return csv_table(list(rows[0]), [["" if v is None else str(v) for v in row.values()] for row in rows])


def to_json(table: OverheadTable, cells: Sequence[Cell] | None = None) -> dict[str, Any]:
    """Return everything, with the tables of operations, and with the comparison if there was one."""
    shape = table.rows[0].shape
    document: dict[str, Any] = {
        "conventions": CONVENTIONS,
        "input_size": list(table.input_size),
        "head": table.head.to_dict(),
        "rows": [_flatten(row) for row in table.rows],
        "percentages": {name: asdict(percentages) for name, percentages in summarise(table.rows).items()},
        "operations": {
            "counts_for": {"backbone": table.rows[0].backbone.name, **shape.letters},
            **{head: evaluate_operations(operations, shape) for head, operations in table.operations.items()},
        },
    }
    if cells is not None:
        document["check"] = [{**asdict(cell), "is_expected": cell.is_expected} for cell in cells]
    return document


def to_text(table: OverheadTable, titles: Mapping[str, str], *, markdown: bool = False) -> str:
    """Return all tables for a terminal or as Markdown; `titles` are those of backbones and data sets, by name."""
    head = head_title(table.head)
    height, width = table.input_size
    first = table.rows[0]
    letters = ", ".join(f"{letter} = {value}" for letter, value in first.shape.letters.items())
    is_varied = len({(row.backbone.name, row.backbone.stride) for row in table.rows}) > len(
        {row.backbone.name for row in table.rows}
    )
    parts = [
        f"Parameters and operations of one image of {height}x{width}, m = {table.head.prototypes_per_class}; "
        f"a head's are added to its backbone's, % are of the backbone. The linear head normalises its features to "
        "length 1; the plain one is the network's own classifier\n",
        format_table([text.format(head=head) for text in _HEADER], _body(table, titles, markdown), markdown=markdown),
        _heading("Head over backbone, all rows", markdown)
        + format_table(("%", "smallest", "largest", "mean"), _percentages(table, head), markdown=markdown),
    ]
    if is_varied:
        title = _heading("What finer cells cost: backbone and head together, against the first stride", markdown)
        parts.append(title + format_table(_STRIDE_HEADER, _compare_strides(table, titles), markdown=markdown))
    for name, operations in zip(("linear", head), table.operations.values(), strict=True):
        title = f"Operations of the {name} head; counts for {titles.get(first.backbone.name, first.backbone.name)}"
        parts.append(
            _heading(f"{title}, {letters}", markdown)
            + format_table(
                ("operation", "paper", "graph", "paper count", "graph count"),
                _operations(operations, first.shape),
                left=3,
                markdown=markdown,
            )
        )
    meaning = "\n".join(f"{'- ' if markdown else ''}{name}: {text}" for name, text in CONVENTIONS.items())
    parts.append(_heading("What is counted", markdown) + meaning + "\n")
    return "\n".join(parts)


def _flatten(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {
        "backbone": row.backbone.name,
        "dataset": row.dataset,
        "classes": row.shape.num_classes,
        "prototypes_per_class": row.shape.prototypes_per_class,
        "features": row.shape.num_features,
        "stride": row.backbone.stride,
        "keep_layers": row.backbone.keep_layers,
        "grid": f"{row.shape.grid[0]}x{row.shape.grid[1]}",
    }
    for name, counts in {"backbone": row.backbone.counts, "linear": row.linear, "opal": row.opal}.items():
        values |= {f"{name}_{count}": getattr(counts, count) for count in _COUNTS}
    values |= {f"{head}_graph": getattr(row, head).graph for head in _TABULATED}
    values |= {f"{head}_{count}_percent": row.percent(head, count) for head in _TABULATED for count in SHARES}
    # a network that is cut earlier has no classifier of its own
    values |= {f"plain_{count}": None if row.plain is None else getattr(row.plain, count) for count in _COUNTS}
    values |= {f"plain_{count}_percent": row.percent("plain", count) if row.plain else None for count in SHARES}
    return values


def _heading(text: str, markdown: bool) -> str:
    return f"### {text}\n\n" if markdown else f"{text}\n"


def _body(table: OverheadTable, titles: Mapping[str, str], markdown: bool) -> list[list[str]]:
    body, previous = [], ""
    for row in table.rows:
        name, counts = _title(row, titles), row.backbone.counts
        backbone = [name, format_count(counts.params), _giga(counts.paper, 2), _giga(counts.flops, 2)]
        # a reader of the terminal sees the groups; Markdown may be sorted and cut
        if name == previous and not markdown:
            backbone = [""] * len(backbone)
        previous = name
        classes = f"{titles.get(row.dataset, row.dataset)} ({row.shape.num_classes})"
        if row.dataset == format_classes(row.shape.num_classes):
            classes = str(row.shape.num_classes)
        heads = [
            text
            for head in (row.linear, row.opal)
            for text in (format_count(head.params), _giga(head.paper, 4), _giga(head.flops, 4))
        ]
        body.append([*backbone, classes, *heads, *(f"{row.percent('opal', count):.2f}" for count in SHARES)])
    return body


def _title(row: Row, titles: Mapping[str, str]) -> str:
    name = titles.get(row.backbone.name, row.backbone.name)
    return name if row.backbone.stride == _PAPER_STRIDE else f"{name}, {row.backbone.cells}"


def _compare_strides(table: OverheadTable, titles: Mapping[str, str]) -> list[list[str]]:
    body = []
    firsts: dict[tuple[str, str], Row] = {}
    for row in sorted(table.rows, key=lambda row: (row.backbone.name, row.dataset)):
        first = firsts.setdefault((row.backbone.name, row.dataset), row)
        params, flops = (
            tuple(getattr(r.backbone.counts, count) + getattr(r.opal, count) for r in (row, first))
            for count in ("params", "flops")
        )
        body.append(
            [
                titles.get(row.backbone.name, row.backbone.name),
                str(row.shape.num_classes),
                row.backbone.cells.removeprefix("stride "),
                f"{row.backbone.grid[0]}x{row.backbone.grid[1]}",
                _giga(row.backbone.counts.flops, 2),
                _giga(row.opal.flops, 2),
                _giga(flops[0], 2),
                f"{100 * flops[0] / flops[1]:.0f}",
                f"{100 * params[0] / params[1]:.0f}",
            ]
        )
    return body


def _percentages(table: OverheadTable, title: str) -> list[list[str]]:
    rows = []
    for name, percentages in summarise(table.rows).items():
        head, _, count = name.partition("_")
        values = (percentages.smallest, percentages.largest, percentages.mean)
        label = f"{title if head == 'opal' else head}: {_SHARE_TITLES[count]}"
        rows.append([label, *(f"{value:.3f}" for value in values)])
    return rows


def _operations(operations: Sequence[Operation], shape: Shape) -> list[list[str]]:
    rows = [
        [row.name, _formula(row.paper), _formula(row.graph), f"{evaluate(row.paper, shape):,}",
         f"{evaluate(row.graph, shape):,}"]
        for row in operations
    ]  # fmt: skip
    paper, graph = (sum(evaluate(getattr(row, side), shape) for row in operations) for side in ("paper", "graph"))
    rows.append(["total", "", "", f"{paper:,}", f"{graph:,}"])
    if evidence := sum(evaluate(row.graph, shape) for row in operations if row.name.startswith("evidence")):
        label = "total without the evidence, as the authors' modules"
        rows.append([label, "", "", f"{paper:,}", f"{graph - evidence:,}"])
    return rows


def _formula(formula: str) -> str:
    return "-" if formula == "0" else formula


def _giga(value: int, digits: int) -> str:
    return format_fixed(value, 10**9, digits)
