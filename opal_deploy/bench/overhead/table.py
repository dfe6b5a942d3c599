"""The overhead table: every backbone with every number of classes, and the heads on it.

The linear head is the paper's, on features normalised to length 1; the plain one is the network's own classifier.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Target
from opal_deploy.bench.overhead.counting import CountedBackbone, Counts, count_backbone, count_classifier
from opal_deploy.bench.overhead.operations import (
    Operation,
    Shape,
    evaluate_operations,
    head_title,
    list_operations,
    sum_operations,
)
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig

CONVENTIONS = {
    "paper": "what the paper prints as FLOPs: multiply-accumulates counted as one, with biases, activations, "
    "normalisation and pooling, as ptflops counts PyTorch modules",
    "MACs": "multiply-accumulates of convolutions and matrix products alone",
    "true FLOPs": "two for each multiply-accumulate of a convolution or matrix product",
    "graph": "one for each multiply-accumulate and for each element that any other operation of the exported graph "
    "takes in or gives out",
}
# attributes of `Counts` that a head has in % of its backbone
SHARES = ("params", "paper", "flops")


@dataclass(frozen=True)
class Row:
    """One backbone with one number of classes.

    Attributes:
        backbone: with its counts.
        dataset: a name for the classes: `cub`, or `1000 classes`.
        shape: of the heads.
        linear: counts of the linear head.
        opal: counts of the head that the table was made for.
        plain: counts of the network's own classifier; None where the backbone is cut earlier than before it.
    """

    backbone: CountedBackbone
    dataset: str
    shape: Shape
    linear: Counts
    opal: Counts
    plain: Counts | None = None

    @property
    def heads(self) -> dict[str, Counts]:
        """The counts of the heads, by `linear`, `opal` and, where there is one, `plain`."""
        return {"linear": self.linear, "opal": self.opal} | ({} if self.plain is None else {"plain": self.plain})

    def percent(self, head: str, count: str) -> float:
        """Return what a head adds to its backbone, in %; `head` is one of `heads`, `count` one of SHARES."""
        return float(100 * getattr(self.heads[head], count) / getattr(self.backbone.counts, count))


@dataclass(frozen=True)
class OverheadTable:
    """All rows of one head.

    Attributes:
        head: the head that is compared with the linear one.
        input_size: (H0, W0).
        rows: backbone by backbone and stride by stride, at least one.
    """

    head: HeadConfig
    input_size: tuple[int, int]
    rows: tuple[Row, ...]

    @property
    def operations(self) -> dict[str, tuple[Operation, ...]]:
        """The operations of both heads, by `linear` and `opal`."""
        return {"linear": list_operations(LINEAR_BASELINE), "opal": list_operations(self.head)}


@dataclass(frozen=True)
class Percentages:
    """Smallest, largest and mean of a head's share of its backbone over all rows, in %."""

    smallest: float
    largest: float
    mean: float


def make_table(
    backbones: Sequence[str],
    classes: Iterable[tuple[str, int]],
    head: HeadConfig,
    input_size: tuple[int, int],
    *,
    strides: Sequence[int | None] = (None,),
    keep_layers: bool = False,
    on_backbone: Callable[[CountedBackbone], None] = lambda backbone: None,
) -> OverheadTable:
    """Count every backbone and evaluate every head.

    Args:
        backbones: torchvision's names.
        classes: names and numbers of classes, C each.
        head: the head to compare with the linear one.
        input_size: (H0, W0) in pixels.
        strides: input pixels per cell, at which every backbone is cut; None cuts before its pooling.
        keep_layers: keep all layers at each stride.
        on_backbone: called with each backbone as it is counted.

    Raises:
        UsageError: there is no such backbone, none of this stride, its layers cannot be kept, or its stride does not
            divide the size.
        MissingExtra: ptflops is not installed.
    """
    from opal_deploy.model.backbones import list_variants

    operations = [list_operations(each) for each in (LINEAR_BASELINE, head)]
    columns = list(classes)
    rows: list[Row] = []
    for name, stride, keep in list_variants(backbones, strides, keep_layers):
        backbone = count_backbone(name, input_size, stride, keep)
        on_backbone(backbone)
        for dataset, number in columns:
            shape = Shape(backbone.num_features, number, head.prototypes_per_class, backbone.grid)
            linear, opal = (sum_operations(each, shape) for each in operations)
            plain = None
            if backbone.has_classifier:
                plain = count_classifier(name, number, (backbone.num_features, *backbone.grid))
            rows.append(Row(backbone, dataset, shape, linear, opal, plain))
    return OverheadTable(head, input_size, tuple(rows))


def summarise(rows: Sequence[Row]) -> dict[str, Percentages]:
    """Return the percentages of the paper's text, by `linear_params`, `linear_paper`, ..., and those of `plain`."""
    summary = {}
    for head in dict.fromkeys(head for row in rows for head in row.heads):
        for count in SHARES:
            values = [row.percent(head, count) for row in rows if head in row.heads]
            summary[f"{head}_{count}"] = Percentages(min(values), max(values), statistics.fmean(values))
    return summary


def build_measurements(table: OverheadTable) -> Iterator[Measurement]:
    """Yield one measurement per backbone and number of classes: counted, so nothing is timed and nothing is better."""
    origin = provenance()
    for row in table.rows:
        yield Measurement(
            kind="overhead",
            target=Target(
                name=f"{row.backbone.name} + {head_title(table.head)}",
                backbone=row.backbone.name,
                head=head_title(table.head),
                input_size=table.input_size,
                num_classes=row.shape.num_classes,
                prototypes_per_class=row.shape.prototypes_per_class,
            ),
            case={
                "dataset": row.dataset,
                "stride": row.backbone.stride,
                # absent otherwise, as in lines of earlier versions, which are compared by their case
                **({"keep_layers": True} if row.backbone.keep_layers else {}),
            },
            figures=_build_figures(row),
            settings={"conventions": CONVENTIONS},
            details={
                "letters": row.shape.letters,
                **{
                    f"{head}_operations": evaluate_operations(operations, row.shape)
                    for head, operations in table.operations.items()
                },
            },
            **origin,
        )


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
