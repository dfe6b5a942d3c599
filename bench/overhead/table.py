"""The overhead table: every backbone with every number of classes, a linear head and an OPAL head on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from opal_deploy.bench.overhead.counting import Backbone, count_backbone
from opal_deploy.bench.overhead.operations import HeadCounts, Operation, Shape, operations_of, totals
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig


@dataclass(frozen=True)
class Row:
    """One backbone with one number of classes.

    Attributes:
        backbone: counted.
        dataset: a name for the classes: `cub`, or `1000 classes`.
        shape: of the head.
        linear, opal: counts of the two heads; `opal` is whatever head the table was made for.
    """

    backbone: Backbone
    dataset: str
    shape: Shape
    linear: HeadCounts
    opal: HeadCounts

    @property
    def linear_params(self) -> float:
        """Parameters of the linear head, in % of the backbone's."""
        return 100 * self.linear.params / self.backbone.counts.params

    @property
    def linear_paper(self) -> float:
        """Operations of the linear head in the paper's convention, in % of the backbone's."""
        return 100 * self.linear.paper / self.backbone.counts.paper

    @property
    def linear_flops(self) -> float:
        """True FLOPs of the linear head, in % of the backbone's."""
        return 100 * self.linear.flops / self.backbone.counts.flops

    @property
    def opal_params(self) -> float:
        """Parameters of the OPAL head, in % of the backbone's."""
        return 100 * self.opal.params / self.backbone.counts.params

    @property
    def opal_paper(self) -> float:
        """Operations of the OPAL head in the paper's convention, in % of the backbone's."""
        return 100 * self.opal.paper / self.backbone.counts.paper

    @property
    def opal_flops(self) -> float:
        """True FLOPs of the OPAL head, in % of the backbone's."""
        return 100 * self.opal.flops / self.backbone.counts.flops


@dataclass(frozen=True)
class Table:
    """All rows of one head.

    Attributes:
        head: of the column `opal`. input_size: (H0, W0).
        rows: backbone by backbone, at least one.
        linear_operations, opal_operations: the tables of both heads' operations.
    """

    head: HeadConfig
    input_size: tuple[int, int]
    rows: tuple[Row, ...]
    linear_operations: tuple[Operation, ...] = field(default_factory=lambda: operations_of(LINEAR_BASELINE))

    @property
    def opal_operations(self) -> tuple[Operation, ...]:
        """Of `head`."""
        return operations_of(self.head)


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
    counted: Callable[[Backbone], None] = lambda backbone: None,
) -> Table:
    """Count every backbone and evaluate every head.

    Args:
        backbones: torchvision's names.
        classes: names and numbers of classes, C each.
        head: of the column `opal`.
        input_size: (H0, W0).
        counted: is told of each backbone as it is counted.

    Raises:
        UsageError: no such backbone, or a size that its stride does not divide.
        MissingExtra: ptflops is not installed.
    """
    linear_operations, opal_operations = operations_of(LINEAR_BASELINE), operations_of(head)
    columns = list(classes)
    rows: list[Row] = []
    for name in dict.fromkeys(backbones):
        backbone = count_backbone(name, input_size)
        counted(backbone)
        for dataset, number in columns:
            shape = Shape(backbone.num_features, number, head.prototypes_per_class, backbone.grid)
            linear, opal = totals(linear_operations, shape), totals(opal_operations, shape)
            rows.append(Row(backbone, dataset, shape, linear, opal))
    return Table(head, input_size, tuple(rows), linear_operations)


def summarise(rows: Sequence[Row]) -> dict[str, Percentages]:
    """The percentages of the paper's text, by `linear_params`, `linear_paper`, `linear_flops` and so for `opal`."""
    names = ("linear_params", "linear_paper", "linear_flops", "opal_params", "opal_paper", "opal_flops")
    values = {name: [float(getattr(row, name)) for row in rows] for name in names}
    return {name: Percentages(min(found), max(found), statistics.fmean(found)) for name, found in values.items()}
