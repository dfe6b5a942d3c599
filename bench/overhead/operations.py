"""The head as an explicit table of operations: what each costs, in the paper's convention and in the graph we export.

Costs are formulas in D features, K = C*m prototypes, C classes and H*W cells, for one picture, and the counts are what
the formulas evaluate to, so that what is printed is what was computed.

`paper` lists the authors' modules as their tool (see `counter`) counts them. For OPAL that is the projection and its
bias, one for each element of the softmax, and two for each element of the max pooling, once as the module and once as
the function that it calls: H*W*K*(D + 4). Norm, division and the comparison with C anchors of K values count nothing.
For the linear head it is 2*H*W*D for the average pooling and D*C for the dense layer, whose bias does not change a
digit of what the paper prints.

`graph` counts one for each element that an operation of the exported graph takes in or gives out, whichever is more,
and one for each multiply-accumulate; moving and casting count nothing. There a pooling is one operation, a class is
compared by the sum of its block instead of K differences, and `argmax`, which the authors' network does not give, is
an operation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from opal_deploy.model.config import HeadConfig


@dataclass(frozen=True)
class Shape:
    """What the letters of a formula stand for: see DESIGN's table of words."""

    num_features: int
    num_classes: int
    prototypes_per_class: int
    grid: tuple[int, int]

    @property
    def letters(self) -> dict[str, int]:
        """D, C, m, K, H and W."""
        return {
            "D": self.num_features,
            "C": self.num_classes,
            "m": self.prototypes_per_class,
            "K": self.num_classes * self.prototypes_per_class,
            "H": self.grid[0],
            "W": self.grid[1],
        }


@dataclass(frozen=True)
class Operation:
    """One row.

    Attributes:
        name: for a person.
        paper, graph: formulas, sums of products of letters and numbers; `0` where it is not there, or not counted.
        macs: whether what it does are multiply-accumulates of a convolution or matrix product.
        params: formula of what is learned.
    """

    name: str
    paper: str
    graph: str
    macs: bool = False
    params: str = "0"


@dataclass(frozen=True)
class HeadCounts:
    """Totals of a head.

    Attributes:
        params: learned parameters. paper: operations in the paper's convention.
        graph: operations of the exported graph. macs: of its projection and dense layer.
    """

    params: int
    paper: int
    graph: int
    macs: int

    @property
    def flops(self) -> int:
        """True floating-point operations of convolutions and matrix products: two for each multiply-accumulate."""
        return 2 * self.macs


def evaluate(formula: str, shape: Shape) -> int:
    """A sum of products: `H*W*K`, `2*K + C`."""
    letters = shape.letters
    terms = (term.split("*") for term in formula.replace(" ", "").split("+"))
    return sum(math.prod(letters[factor] if factor in letters else int(factor) for factor in term) for term in terms)


def totals(operations: Iterable[Operation], shape: Shape) -> HeadCounts:
    """The sums of a table."""
    rows = list(operations)
    return HeadCounts(
        params=sum(evaluate(row.params, shape) for row in rows),
        paper=sum(evaluate(row.paper, shape) for row in rows),
        graph=sum(evaluate(row.graph, shape) for row in rows),
        macs=sum(evaluate(row.graph, shape) for row in rows if row.macs),
    )


def operations_of(head: HeadConfig) -> tuple[Operation, ...]:
    """The table of any head: OPAL, its ablations, its distances, the linear baseline."""
    width = "K" if head.projection else "D"
    rows: list[Operation] = []
    if head.projection:
        rows.append(Operation("projection: 1x1 convolution", "H*W*D*K", "H*W*D*K", macs=True, params="D*K"))
        rows.append(Operation("projection: bias", "H*W*K", "H*W*K", params="K"))
    cells = f"H*W*{width}"
    if head.cws:
        rows.append(Operation("attention: softmax over channels at each cell", cells, cells))
    pooling = "max" if head.pooling == "max" else "mean"
    rows.append(Operation(f"scores: {pooling} over cells", cells, cells))
    rows.append(Operation(f"scores: {pooling} over cells, counted again as the function it calls", cells, "0"))
    if head.anchors:
        rows.append(Operation("evidence: argmax over cells", "0", cells))
    rows.append(Operation("embedding: norm", "0", f"{width} + 1"))
    rows.append(Operation("embedding: division by the norm", "0", width))
    if head.anchors:
        rows += _DISTANCES[head.distance]
        rows.append(Operation("logits: minus the distance", "0", "C"))
    else:
        dense = f"{width}*C"
        rows.append(Operation("logits: dense layer", dense, dense, macs=True, params=dense))
        rows.append(Operation("logits: bias of the dense layer", "0", "C", params="C"))
    return tuple(rows)


def is_linear(head: HeadConfig) -> bool:
    """The linear baseline: m and the distance are nothing to it."""
    parts = (head.projection, head.cws, head.pooling, head.anchors)
    return parts == (False, False, "avg", False)


def head_title(head: HeadConfig) -> str:
    """`OPAL`, `linear`, or what differs from OPAL."""
    if is_linear(head):
        return "linear"
    parts = {"projection": head.projection, "CWS": head.cws, "GMP": head.pooling == "max", "anchors": head.anchors}
    off = ", ".join(name for name, is_on in parts.items() if not is_on)
    distance = f", {head.distance}" if head.anchors and head.distance != "l2" else ""
    return f"OPAL{distance}{f' without {off}' if off else ''}"


def _row(name: str, graph: str) -> Operation:
    return Operation(f"distance: {name}", "0", graph)


# model/distances.py, operation by operation
_SUM_OUTSIDE = "all classes' sum, less the own, at least 0"
_DISTANCES: dict[str, tuple[Operation, ...]] = {
    "l2": (
        _row("block sums", "K"),
        _row("times the anchors' value: cosine", "C"),
        _row("root of 2 - 2 cos, at least 0", "4*C"),
    ),
    "l1": (
        _row("absolute values and block sums", "2*K"),
        _row(f"outside the block: {_SUM_OUTSIDE}", "3*C"),
        _row("inside the block: difference, absolute value, sum", "3*K"),
        _row("both added", "C"),
    ),
    "l3": (
        _row("absolute values, third powers and block sums", "3*K"),
        _row(f"outside the block: {_SUM_OUTSIDE}", "3*C"),
        _row("inside the block: difference, absolute value, third power, sum", "4*K"),
        _row("both added, at least 0, third root", "3*C"),
    ),
    "kl": (
        _row("z log z: sum, logarithm, product, sum", "4*K"),
        _row("block sums", "K"),
        _row(f"outside the block: {_SUM_OUTSIDE}", "3*C"),
        _row("both times a logarithm, subtracted", "4*C"),
    ),
    "linf": (
        _row("absolute values and the largest of each block", "2*K"),
        _row("outside the block: the two largest of all, the one that is not the own", "3*C"),
        _row("inside the block: difference, absolute value, largest", "3*K"),
        _row("the larger of both", "C"),
    ),
    "tropical": (
        _row("largest and smallest of each block", "2*K"),
        _row("outside the block: largest and smallest of the others", "8*C"),
        _row("inside the block: differences", "2*C"),
        _row("largest less smallest", "3*C"),
    ),
}
