"""The head as an explicit table of operations: what each costs, in the paper's convention and in the exported graph.

Costs are formulas in D features, K = C*m prototypes, C classes and H*W cells, for one image, and every count is
evaluated from its formula, so that what is printed is what was computed.

`paper` lists the authors' modules as their tool (see `counting`) counts them. For OPAL that is the projection and its
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
from typing import Any

from opal_deploy.bench.overhead.counting import Counts
from opal_deploy.model.config import HeadConfig

# model/distances.py, operation by operation: what it does, and its formula in the graph
_SUM_OUTSIDE = "all classes' sum, less the own, at least 0"
_DISTANCES: dict[str, tuple[tuple[str, str], ...]] = {
    "l2": (
        ("block sums", "K"),
        ("times the anchors' value: cosine", "C"),
        ("root of 2 - 2 cos, at least 0", "4*C"),
    ),
    "l1": (
        ("absolute values and block sums", "2*K"),
        (f"outside the block: {_SUM_OUTSIDE}", "3*C"),
        ("inside the block: difference, absolute value, sum", "3*K"),
        ("both added", "C"),
    ),
    "l3": (
        ("absolute values, third powers and block sums", "3*K"),
        (f"outside the block: {_SUM_OUTSIDE}", "3*C"),
        ("inside the block: difference, absolute value, third power, sum", "4*K"),
        ("both added, at least 0, third root", "3*C"),
    ),
    "kl": (
        ("z log z: sum, logarithm, product, sum", "4*K"),
        ("block sums", "K"),
        (f"outside the block: {_SUM_OUTSIDE}", "3*C"),
        ("both times a logarithm, subtracted", "4*C"),
    ),
    "linf": (
        ("absolute values and the largest of each block", "2*K"),
        ("outside the block: the two largest of all, the one that is not the own", "3*C"),
        ("inside the block: difference, absolute value, largest", "3*K"),
        ("the larger of both", "C"),
    ),
    "tropical": (
        ("largest and smallest of each block", "2*K"),
        ("outside the block: largest and smallest of the others", "8*C"),
        ("inside the block: differences", "2*C"),
        ("largest less smallest", "3*C"),
    ),
}


@dataclass(frozen=True)
class Shape:
    """The sizes that a formula's letters stand for.

    Attributes:
        num_features: D.
        num_classes: C.
        prototypes_per_class: m.
        grid: (H, W), cells of the feature map.
    """

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
    """One operation of a head.

    Attributes:
        name: for a person.
        paper: formula in the paper's convention: a sum of products of letters and numbers, or `0`.
        graph: formula for the exported graph.
        macs: whether it consists of multiply-accumulates of a convolution or matrix product.
        params: formula of its learned parameters.
    """

    name: str
    paper: str
    graph: str
    macs: bool = False
    params: str = "0"


def evaluate(formula: str, shape: Shape) -> int:
    """Return what a sum of products such as `H*W*K` or `2*K + C` comes to."""
    letters = shape.letters
    terms = (term.split("*") for term in formula.replace(" ", "").split("+"))
    return sum(math.prod(letters[factor] if factor in letters else int(factor) for factor in term) for term in terms)


def sum_operations(operations: Iterable[Operation], shape: Shape) -> Counts:
    """Return the totals of a table of operations for one shape."""
    rows = list(operations)
    return Counts(
        params=sum(evaluate(row.params, shape) for row in rows),
        paper=sum(evaluate(row.paper, shape) for row in rows),
        macs=sum(evaluate(row.graph, shape) for row in rows if row.macs),
        graph=sum(evaluate(row.graph, shape) for row in rows),
    )


def evaluate_operations(operations: Iterable[Operation], shape: Shape) -> list[dict[str, Any]]:
    """Return a table of operations as plain values: the formulas, and what they come to for one shape."""
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


def list_operations(head: HeadConfig) -> tuple[Operation, ...]:
    """Return the operations of any head: OPAL, its ablations, its distances, the linear baseline."""
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
        rows += [Operation(f"distance: {name}", "0", graph) for name, graph in _DISTANCES[head.distance]]
        rows.append(Operation("logits: minus the distance", "0", "C"))
    else:
        dense = f"{width}*C"
        rows.append(Operation("logits: dense layer", dense, dense, macs=True, params=dense))
        rows.append(Operation("logits: bias of the dense layer", "0", "C", params="C"))
    return tuple(rows)


def head_title(head: HeadConfig) -> str:
    """Return `OPAL`, `linear`, or how an ablation differs from OPAL."""
    if head.kind != "opal":
        return head.kind
    parts = {"projection": head.projection, "CWS": head.cws, "GMP": head.pooling == "max", "anchors": head.anchors}
    off = ", ".join(name for name, is_on in parts.items() if not is_on)
    distance = f", {head.distance}" if head.anchors and head.distance != "l2" else ""
    return f"OPAL{distance}{f' without {off}' if off else ''}"
