"""The overhead table: every backbone with every number of classes, and its heads, as measurements and as text.

The linear head is the paper's, on features normalised to length 1; the plain one is the network's own classifier.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Target
from opal_deploy.bench.overhead.counting import (
    HEAD_OPERATIONS,
    LINEAR_OPERATIONS,
    OPAL_OPERATIONS,
    CountedBackbone,
    Counts,
    Shape,
    count_backbone,
    count_classifier,
    evaluate_operations,
    sum_operations,
)
from opal_deploy.bench.report import format_fixed, format_table
from opal_deploy.logs import Log

CONVENTIONS = {
    "paper": "what the paper prints as FLOPs: multiply-accumulates counted as one, with biases, activations, "
    "normalisation and pooling, as ptflops counts PyTorch modules",
    "MACs": "only multiply-accumulates of convolutions and matrix products",
    "true FLOPs": "two per multiply-accumulate of a convolution or matrix product",
    "graph": "one per multiply-accumulate, and one per input or output element of any other operation of the exported "
    "graph",
}
# attributes of `Counts` that are given in % of the backbone
SHARES = ("params", "paper", "flops")


_HEADER = (
    "backbone", "params", "paper GFLOPs", "true GFLOPs", "classes",
    "linear params", "paper GFLOPs", "true GFLOPs",
    "OPAL params", "paper GFLOPs", "true GFLOPs", "params %", "paper %", "true %",
)  # fmt: skip
# stride of the paper's nine backbones, which needs no mention
_PAPER_STRIDE = 32
_SHARE_TITLES = {"params": "parameters", "paper": "operations, paper's convention", "flops": "true FLOPs"}


@dataclass(frozen=True)
class Row:
    """One backbone with one number of classes.

    Attributes:
        plain: counts of the network's own classifier; None if the backbone is cut too early for it.
    """

    backbone: CountedBackbone
    dataset: str
    shape: Shape
    linear: Counts
    opal: Counts
    plain: Counts | None = None

    @property
    def heads(self) -> dict[str, Counts]:
        """The counts by head: `linear`, `opal` and, if it fits, `plain`."""
        return {"linear": self.linear, "opal": self.opal} | ({} if self.plain is None else {"plain": self.plain})

    def percent(self, head: str, count: str) -> float:
        """Return what a head of `heads` adds to its backbone, in %; `count` is one of SHARES."""
        return float(100 * getattr(self.heads[head], count) / getattr(self.backbone.counts, count))


@dataclass(frozen=True)
class Percentages:
    """Smallest, largest and mean of a head's share of its backbone over all rows, in %."""

    smallest: float
    largest: float
    mean: float


def count_rows(
    backbones: Sequence[str],
    classes: Iterable[tuple[str, int]],
    prototypes: int,
    input_size: tuple[int, int],
    *,
    strides: Sequence[int | None] = (None,),
    keep_layers: bool = False,
    log: Log = lambda line: None,
) -> list[Row]:
    """Count every backbone and evaluate every head.

    Args:
        strides: input pixels per cell, at which every backbone is cut; None cuts before its pooling.

    Raises:
        UsageError: no such backbone or stride, its layers cannot be kept, or the stride does not divide the size.
        MissingExtra: ptflops is not installed.
    """
    from opal_deploy.model.backbones import list_variants

    columns = list(classes)
    rows: list[Row] = []
    for name, stride, keep in list_variants(backbones, strides, keep_layers):
        backbone = count_backbone(name, input_size, stride, keep)
        counts = backbone.counts
        log(
            f"{name}, {backbone.cells}: {format_count(counts.params)} parameters, {counts.paper / 1e9:.2f} GFLOPs in "
            f"the paper's convention, {counts.flops / 1e9:.2f} true GFLOPs"
        )
        for dataset, number in columns:
            shape = Shape(backbone.num_features, number, prototypes, backbone.grid)
            linear, opal = (sum_operations(each, shape) for each in (LINEAR_OPERATIONS, OPAL_OPERATIONS))
            plain = None
            if backbone.has_classifier:
                plain = count_classifier(name, number, (backbone.num_features, *backbone.grid))
            rows.append(Row(backbone, dataset, shape, linear, opal, plain))
    return rows


def summarise(rows: Sequence[Row]) -> dict[str, Percentages]:
    """Return the percentages by head and count: `linear_params`, `linear_paper`, ..."""
    summary = {}
    for head in dict.fromkeys(head for row in rows for head in row.heads):
        for count in SHARES:
            values = [row.percent(head, count) for row in rows if head in row.heads]
            summary[f"{head}_{count}"] = Percentages(min(values), max(values), statistics.fmean(values))
    return summary


def build_measurements(rows: Sequence[Row], input_size: tuple[int, int]) -> Iterator[Measurement]:
    """Yield one measurement per row; counts are neither timed nor better or worse."""
    origin = provenance()
    for row in rows:
        operations = {
            f"{head}_operations": evaluate_operations(table, row.shape) for head, table in HEAD_OPERATIONS.items()
        }
        yield Measurement(
            kind="overhead",
            target=Target(
                name=f"{row.backbone.name} + opal",
                backbone=row.backbone.name,
                head="opal",
                input_size=input_size,
                num_classes=row.shape.num_classes,
                prototypes_per_class=row.shape.prototypes_per_class,
            ),
            case={
                "dataset": row.dataset, "stride": row.backbone.stride, "keep_layers": row.backbone.keep_layers,
            },
            figures=_build_figures(row),
            settings={"conventions": CONVENTIONS},
            details={"letters": row.shape.letters, **operations},
            **origin,
        )  # fmt: skip


def _build_figures(row: Row) -> dict[str, Figure]:
    figures = _count_figures("backbone", row.backbone.counts)
    for head, counts in row.heads.items():
        figures |= _count_figures(head, counts)
        if counts.graph:
            figures[f"{head}_graph_operations"] = Figure(counts.graph, "operations")
        for count, name in zip(SHARES, ("params", "macs_paper", "flops"), strict=True):
            figures[f"{head}_{name}_percent"] = Figure(row.percent(head, count), "%")
    return figures


def _count_figures(name: str, counts: Counts) -> dict[str, Figure]:
    return {
        f"{name}_params": Figure(counts.params, "parameters"),
        f"{name}_macs_paper": Figure(counts.paper, "operations"),
        f"{name}_macs": Figure(counts.macs, "MACs"),
        f"{name}_flops": Figure(counts.flops, "FLOPs"),
    }


def format_classes(number: int) -> str:
    """Return a name for a number of classes without a data set."""
    return f"{number} classes"


def format_count(value: int) -> str:
    """Return a count as the paper writes it: 409.8k, 2.049M, 23.51M."""
    if value >= 10_000_000:
        return f"{format_fixed(value, 10**6, 2)}M"
    return f"{format_fixed(value, 10**6, 3)}M" if value >= 1_000_000 else f"{format_fixed(value, 10**3, 1)}k"


def format_tables(
    rows: Sequence[Row], input_size: tuple[int, int], titles: Mapping[str, str], *, markdown: bool = False
) -> str:
    """Return all tables for a terminal or as Markdown; `titles` are those of backbones and data sets, by name."""
    height, width = input_size
    m = rows[0].shape.prototypes_per_class
    parts = [
        f"Parameters and operations per image of {height}x{width}, m = {m}; head counts come on top of the backbone's, "
        "% are relative to the backbone. The linear head normalises its features to length 1; the plain head is the "
        "network's own classifier\n",
        format_table(_HEADER, _format_rows(rows, titles, markdown), markdown=markdown),
        _heading("Head relative to backbone, over all rows", markdown)
        + format_table(("%", "smallest", "largest", "mean"), _format_percentages(rows), markdown=markdown),
    ]
    meaning = "\n".join(f"{'- ' if markdown else ''}{name}: {text}" for name, text in CONVENTIONS.items())
    return "\n".join([*parts, _heading("Conventions", markdown) + meaning + "\n"])


def _heading(text: str, markdown: bool) -> str:
    return f"### {text}\n\n" if markdown else f"{text}\n"


def _format_rows(rows: Sequence[Row], titles: Mapping[str, str], markdown: bool) -> list[list[str]]:
    body, previous = [], ""
    for row in rows:
        name, counts = _title(row, titles), row.backbone.counts
        backbone = [name, format_count(counts.params), _giga(counts.paper, 2), _giga(counts.flops, 2)]
        # groups are visible on a terminal; rows of Markdown may be sorted
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


def _format_percentages(rows: Sequence[Row]) -> list[list[str]]:
    body = []
    for name, percentages in summarise(rows).items():
        head, _, count = name.partition("_")
        values = (percentages.smallest, percentages.largest, percentages.mean)
        label = f"{'OPAL' if head == 'opal' else head}: {_SHARE_TITLES[count]}"
        body.append([label, *(f"{value:.3f}" for value in values)])
    return body


def _giga(value: int, digits: int) -> str:
    return format_fixed(value, 10**9, digits)
