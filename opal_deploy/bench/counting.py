"""Parameters and operations: of backbones, counted on real modules, and of heads, as an explicit table.

Two conventions, never mixed:

- `paper`: what the paper prints as FLOPs. Its tool behaves as ptflops, 0.7.2 or later, with the pytorch backend: one
  per multiply-accumulate, one per element of a bias, and one per input element of an activation, a pooling or a
  normalisation without weights (two with weights). Activations and pooling that a module passes on to a function count
  twice.
- `macs`: only multiply-accumulates of convolutions and matrix products. True FLOPs are two per multiply-accumulate.

Costs of heads are formulas in D features, K = C*m prototypes, C classes and H*W cells, for one image. Every count is
evaluated from its formula, so that the printed formula is what was computed.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Counts:
    """Parameters, and operations for one image, of a module.

    Attributes:
        paper: operations in the paper's convention.
        macs: multiply-accumulates of convolutions and matrix products.
    """

    params: int
    paper: int
    macs: int

    @property
    def flops(self) -> int:
        """True floating-point operations: two per multiply-accumulate."""
        return 2 * self.macs


@dataclass(frozen=True)
class CountedBackbone:
    """A backbone with its counts.

    Attributes:
        has_classifier: whether the network's own classifier fits its features.
    """

    name: str
    counts: Counts
    num_features: int
    grid: tuple[int, int]
    stride: int
    keep_layers: bool = False
    has_classifier: bool = True

    @property
    def cells(self) -> str:
        """The stride, and whether all layers are kept at it: `stride 16, all layers`."""
        return f"stride {self.stride}{', all layers' if self.keep_layers else ''}"


@cache
def count_backbone(
    name: str, input_size: tuple[int, int], stride: int | None = None, keep_layers: bool = False
) -> CountedBackbone:
    """Count a backbone; results are cached.

    Raises:
        UsageError: no such backbone or stride, its layers cannot be kept, or the stride does not divide the size.
        MissingExtra: ptflops is not installed.
    """
    from opal_deploy.model import backbones

    network = backbones.build(name, stride=stride, keep_layers=keep_layers, input_size=input_size, device="meta").eval()
    grid = network.grid(input_size)
    counts = count_module(network, (3, *input_size), name)
    has_classifier = not backbones.is_transformer(name) and (
        keep_layers or network.stride == backbones.own_stride(name)
    )
    return CountedBackbone(name, counts, network.num_features, grid, network.stride, keep_layers, has_classifier)


@cache
def count_classifier(name: str, num_classes: int, features: tuple[int, int, int]) -> Counts:
    """Count the network's own classifier for C classes on features of shape (D, H, W); results are cached."""
    from opal_deploy.model.backbones import build_classifier

    return count_module(build_classifier(name, num_classes, device="meta"), features, f"{name}'s classifier")


def count_module(module: nn.Module, input_shape: tuple[int, ...], name: str = "module") -> Counts:
    """Count a module in both conventions.

    Args:
        input_shape: shape of one input, without the batch.

    Raises:
        UsageError: ptflops cannot count this module.
        MissingExtra: ptflops is not installed.
    """
    from opal_deploy.model.backbones import count_macs

    params = sum(p.numel() for p in module.parameters() if p.requires_grad)
    macs = count_macs(module, input_shape)
    return Counts(params, count_paper_operations(module, input_shape, name), macs)


def count_paper_operations(module: nn.Module, input_shape: tuple[int, ...], name: str = "module") -> int:
    """Return the operations of one input as ptflops counts them; arguments and errors as in `count_module`."""
    require("ptflops", "bench", "opal-deploy bench overhead")
    import torch
    from ptflops import get_model_complexity_info

    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        # on meta a linear layer runs as a product in Python, which ptflops would count a second time
        module.to_empty(device="cpu")
    output = io.StringIO()
    # on a failure it prints the traceback and returns None
    with torch.no_grad(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        operations, _ = get_model_complexity_info(
            module, input_shape, as_strings=False, print_per_layer_stat=False, backend="pytorch"
        )
    if operations is None:
        reason = output.getvalue().strip().splitlines()[-1:] or ["no reason given"]
        raise UsageError(f"{name}: ptflops cannot count it ({reason[0]}); leave this backbone out")
    return int(operations)


@dataclass(frozen=True)
class Shape:
    """The sizes that a formula's letters stand for: D, C, m and (H, W)."""

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
        paper: formula in the paper's convention: a sum of products of letters and numbers.
        is_mac: whether these are multiply-accumulates.
        params: formula of its parameters.
    """

    name: str
    paper: str
    is_mac: bool = False
    params: str = "0"


def evaluate(formula: str, shape: Shape) -> int:
    """Evaluate a sum of products such as `H*W*K` or `2*K + C`."""
    letters = shape.letters
    terms = (term.split("*") for term in formula.replace(" ", "").split("+"))
    return sum(math.prod(letters[factor] if factor in letters else int(factor) for factor in term) for term in terms)


def sum_operations(operations: Iterable[Operation], shape: Shape) -> Counts:
    """Return the totals of a table of operations for one shape."""
    rows = [(evaluate(row.params, shape), evaluate(row.paper, shape), row.is_mac) for row in operations]
    params, paper, _ = map(sum, zip(*rows, strict=True))
    return Counts(params, paper, sum(count for _, count, is_mac in rows if is_mac))


def evaluate_operations(operations: Iterable[Operation], shape: Shape) -> list[dict[str, Any]]:
    """Return a table of operations for JSON: the formulas, and their values for one shape."""
    return [
        {"operation": row.name, "paper": row.paper, "paper_count": evaluate(row.paper, shape), "is_mac": row.is_mac}
        for row in operations
    ]


OPAL_OPERATIONS = (
    Operation("projection: 1x1 convolution", "H*W*D*K", is_mac=True, params="D*K"),
    Operation("projection: bias", "H*W*K", params="K"),
    Operation("attention: softmax over channels at each cell", "H*W*K"),
    Operation("scores: max over cells", "H*W*K"),
    Operation("scores: max over cells, counted again as the called function", "H*W*K"),
)
# the bias of the dense layer changes no digit that the paper prints
LINEAR_OPERATIONS = (
    Operation("scores: mean over cells", "H*W*D"),
    Operation("scores: mean over cells, counted again as the called function", "H*W*D"),
    Operation("logits: dense layer", "D*C", is_mac=True, params="D*C + C"),
)
HEAD_OPERATIONS = {"linear": LINEAR_OPERATIONS, "opal": OPAL_OPERATIONS}
