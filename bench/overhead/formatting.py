"""The overhead table for people and machines: text, Markdown, CSV, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from opal_deploy.bench.overhead.check import Cell
from opal_deploy.bench.overhead.layout import aligned, comma_separated, fixed, markdown
from opal_deploy.bench.overhead.operations import Operation, Shape, evaluate, head_title
from opal_deploy.bench.overhead.table import Row, Table, summarise

Format = Literal["text", "json", "csv", "markdown"]

CONVENTIONS = {
    "paper": "what the paper prints as FLOPs: multiply-accumulates counted as one, with biases, activations, "
    "normalisation and pooling, as ptflops counts PyTorch modules",
    "MACs": "multiply-accumulates of convolutions and matrix products alone",
    "true FLOPs": "two for each multiply-accumulate of a convolution or matrix product",
    "graph": "one for each multiply-accumulate and for each element that any other operation of the exported graph "
    "takes in or gives out",
}


def to_text(table: Table, titles: Mapping[str, str] | None = None) -> str:
    """For a terminal; `titles` of backbones and data sets by name."""
    return _document(table, titles or {}, as_markdown=False)


def to_markdown(table: Table, titles: Mapping[str, str] | None = None) -> str:
    """The same as Markdown."""
    return _document(table, titles or {}, as_markdown=True)


def to_csv(table: Table) -> str:
    """One line per backbone and number of classes; counts are whole numbers, shares are in %."""
    flat = [flat_row(row) for row in table.rows]
    return comma_separated(list(flat[0]), [[str(value) for value in row.values()] for row in flat])


def to_json(table: Table, checked: Sequence[Cell] | None = None) -> dict[str, Any]:
    """Everything, the tables of operations included."""
    shape = table.rows[0].shape
    document: dict[str, Any] = {
        "conventions": CONVENTIONS,
        "input_size": list(table.input_size),
        "head": table.head.to_dict(),
        "rows": [flat_row(row) for row in table.rows],
        "percentages": {name: asdict(found) for name, found in summarise(table.rows).items()},
        "operations": {
            "counts_for": {"backbone": table.rows[0].backbone.name, **shape.letters},
            "linear": operation_rows(table.linear_operations, shape),
            "opal": operation_rows(table.opal_operations, shape),
        },
    }
    if checked is not None:
        document["check"] = [{**asdict(cell), "is_expected": cell.is_expected} for cell in checked]
    return document


def flat_row(row: Row) -> dict[str, Any]:
    """One row with plain values."""
    found: dict[str, Any] = {
        "backbone": row.backbone.name,
        "dataset": row.dataset,
        "classes": row.shape.num_classes,
        "prototypes_per_class": row.shape.prototypes_per_class,
        "features": row.shape.num_features,
        "grid": f"{row.shape.grid[0]}x{row.shape.grid[1]}",
    }
    for name, counts in (("backbone", row.backbone.counts), ("linear", row.linear), ("opal", row.opal)):
        found |= {
            f"{name}_params": counts.params,
            f"{name}_paper": counts.paper,
            f"{name}_macs": counts.macs,
            f"{name}_flops": counts.flops,
        }
    found |= {"linear_graph": row.linear.graph, "opal_graph": row.opal.graph}
    for head in ("linear", "opal"):
        found |= {
            f"{head}_{figure}_percent": getattr(row, f"{head}_{figure}") for figure in ("params", "paper", "flops")
        }
    return found


def operation_rows(operations: Sequence[Operation], shape: Shape) -> list[dict[str, Any]]:
    """A table of operations, formulas and what they come to for one shape."""
    return [
        {
            "operation": row.name,
            "paper": row.paper,
            "graph": row.graph,
            "paper_count": evaluate(row.paper, shape),
            "graph_count": evaluate(row.graph, shape),
            "is_mac": row.macs,
        }
        for row in operations
    ]


_HEADER = (
    "backbone", "params", "paper GFLOPs", "true GFLOPs", "classes",
    "linear params", "paper GFLOPs", "true GFLOPs",
    "{head} params", "paper GFLOPs", "true GFLOPs", "params %", "paper %", "true %",
)  # fmt: skip


def _document(table: Table, titles: Mapping[str, str], *, as_markdown: bool) -> str:
    draw = markdown if as_markdown else aligned
    title = head_title(table.head)
    height, width = table.input_size
    parts = [
        f"Parameters and operations of one picture of {height}x{width}, m = {table.head.prototypes_per_class}; "
        f"a head's are added to its backbone's, % are of the backbone\n",
        draw([text.format(head=title) for text in _HEADER], _body(table, titles, as_markdown)),
        _heading("Head over backbone, all rows", as_markdown)
        + draw(("%", "smallest", "largest", "mean"), _percentages(table, title)),
    ]
    shape = table.rows[0].shape
    where = f"{titles.get(table.rows[0].backbone.name, table.rows[0].backbone.name)}, " + ", ".join(
        f"{letter} = {value}" for letter, value in shape.letters.items()
    )
    for name, operations in (("linear", table.linear_operations), (title, table.opal_operations)):
        header = ("operation", "paper", "graph", "paper count", "graph count")
        parts.append(
            _heading(f"Operations of the {name} head; counts for {where}", as_markdown)
            + draw(header, _operations(operations, shape), left=3)
        )
    meaning = "\n".join(f"{'- ' if as_markdown else ''}{name}: {text}" for name, text in CONVENTIONS.items())
    parts.append(_heading("What is counted", as_markdown) + meaning + "\n")
    return "\n".join(parts)


def _heading(text: str, as_markdown: bool) -> str:
    return f"### {text}\n\n" if as_markdown else f"{text}\n"


def _body(table: Table, titles: Mapping[str, str], as_markdown: bool) -> list[list[str]]:
    body, before = [], ""
    for row in table.rows:
        counts = row.backbone.counts
        named = [titles.get(row.backbone.name, row.backbone.name), count(counts.params), _giga(counts.paper, 2)]
        named.append(_giga(counts.flops, 2))
        # a reader of the terminal sees the groups; Markdown may be sorted and cut
        if row.backbone.name == before and not as_markdown:
            named = [""] * len(named)
        before = row.backbone.name
        classes = f"{titles.get(row.dataset, row.dataset)} ({row.shape.num_classes})"
        if row.dataset == classes_name(row.shape.num_classes):
            classes = str(row.shape.num_classes)
        heads = [
            text
            for head in (row.linear, row.opal)
            for text in (count(head.params), _giga(head.paper, 4), _giga(head.flops, 4))
        ]
        shares = [f"{value:.2f}" for value in (row.opal_params, row.opal_paper, row.opal_flops)]
        body.append([*named, classes, *heads, *shares])
    return body


def _percentages(table: Table, title: str) -> list[list[str]]:
    names = {"params": "parameters", "paper": "operations, paper's convention", "flops": "true FLOPs"}
    rows = []
    for name, found in summarise(table.rows).items():
        head, _, figure = name.partition("_")
        shown = [f"{value:.3f}" for value in (found.smallest, found.largest, found.mean)]
        rows.append([f"{title if head == 'opal' else head}: {names[figure]}", *shown])
    return rows


def _operations(operations: Sequence[Operation], shape: Shape) -> list[list[str]]:
    rows = [
        [row.name, _formula(row.paper), _formula(row.graph), f"{evaluate(row.paper, shape):,}",
         f"{evaluate(row.graph, shape):,}"]
        for row in operations
    ]  # fmt: skip
    sums = [sum(evaluate(getattr(row, side), shape) for row in operations) for side in ("paper", "graph")]
    lines = [*rows, ["total", "", "", *(f"{value:,}" for value in sums)]]
    if extra := sum(evaluate(row.graph, shape) for row in operations if row.name.startswith("evidence")):
        lines.append(
            ["total without the evidence, as the authors' modules", "", "", f"{sums[0]:,}", f"{sums[1] - extra:,}"]
        )
    return lines


def _formula(formula: str) -> str:
    return "-" if formula == "0" else formula


def classes_name(number: int) -> str:
    """What a number of classes is called that belongs to no data set of the paper's."""
    return f"{number} classes"


def count(value: int) -> str:
    """As the paper writes it: 409.8k, 2.049M, 23.51M."""
    if value >= 10_000_000:
        return f"{fixed(value, 10**6, 2)}M"
    return f"{fixed(value, 10**6, 3)}M" if value >= 1_000_000 else f"{fixed(value, 10**3, 1)}k"


def _giga(value: int, digits: int) -> str:
    return fixed(value, 10**9, digits)
