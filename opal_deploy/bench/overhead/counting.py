"""Parameters and operations of a backbone or a head, counted on real modules.

Two conventions, never mixed:

- `paper`: what the paper prints as FLOPs. Its tool behaves as ptflops, 0.7.2 or later, with its pytorch backend: one
  for a multiply-accumulate, one for each element of a bias, and one for each element that an activation, a
  normalisation without weights (two with) or a pooling takes in; activations and pooling that a module hands on to a
  function are counted in both.
- `macs`: multiply-accumulates of convolutions and matrix products, nothing else. True FLOPs are two for each.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Counts:
    """Parameters, and operations for one image, of a module.

    Attributes:
        params: learned parameters.
        paper: operations in the paper's convention.
        macs: multiply-accumulates of convolutions and matrix products.
        graph: operations of the exported graph; known of heads alone, 0 for a backbone.
    """

    params: int
    paper: int
    macs: int
    graph: int = 0

    @property
    def flops(self) -> int:
        """True floating-point operations: two for each multiply-accumulate."""
        return 2 * self.macs


@dataclass(frozen=True)
class CountedBackbone:
    """A backbone with its counts.

    Attributes:
        name: torchvision's.
        counts: its parameters and operations.
        num_features: D.
        grid: (H, W) of the feature map.
        stride: input pixels per cell.
        keep_layers: whether all layers are kept at this stride.
        has_classifier: whether its features are those that the network's own classifier takes.
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
    """Count torchvision's network up to its cut; each once in a process.

    Args:
        name: torchvision's.
        input_size: (H0, W0) in pixels.
        stride: input pixels per cell, at which the network is cut; None cuts before its pooling.
        keep_layers: keep all layers at this stride.

    Raises:
        UsageError: there is no such backbone, none of this stride, its layers cannot be kept, or its stride does not
            divide the size.
        MissingExtra: ptflops is not installed.
    """
    from opal_deploy.model import backbones

    network = backbones.build(name, stride=stride, keep_layers=keep_layers, device="meta").eval()
    grid = network.grid(input_size)
    counts = count_module(network, (3, *input_size), name)
    has_classifier = keep_layers or network.stride == backbones.own_stride(name)
    return CountedBackbone(name, counts, network.num_features, grid, network.stride, keep_layers, has_classifier)


@cache
def count_classifier(name: str, num_classes: int, features: tuple[int, int, int]) -> Counts:
    """Count the network's own classifier, which its library has behind the backbone; each once in a process.

    Args:
        name: torchvision's.
        num_classes: C.
        features: (D, H, W).
    """
    from opal_deploy.model.backbones import build_classifier

    return count_module(build_classifier(name, num_classes, device="meta"), features, f"{name}'s classifier")


def count_module(module: nn.Module, input_shape: tuple[int, ...], name: str = "module") -> Counts:
    """Count a module in both conventions.

    Args:
        module: in evaluation mode, its parameters on `meta`; they are on the CPU afterwards, with no values.
        input_shape: of one input, without the batch.
        name: the module's name in errors.

    Raises:
        UsageError: ptflops cannot count this module.
        MissingExtra: ptflops is not installed.
    """
    from opal_deploy.model.backbones import count_macs

    params = sum(p.numel() for p in module.parameters() if p.requires_grad)
    macs = count_macs(module, input_shape)
    return Counts(params, count_paper_operations(module, input_shape, name), macs)


def count_paper_operations(module: nn.Module, input_shape: tuple[int, ...], name: str = "module") -> int:
    """Return the operations of one input as ptflops counts them; arguments and errors are those of `count_module`."""
    require("ptflops", "bench", "opal-deploy bench overhead")
    import torch
    from ptflops import get_model_complexity_info

    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        # on meta a linear layer runs as a product in Python, which ptflops would count a second time; values do not
        # matter, so that memory is handed out and never filled
        module.to_empty(device="cpu")
    output = io.StringIO()
    # it runs the module, and on a failure it prints the traceback and returns None
    with torch.no_grad(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        operations, _ = get_model_complexity_info(
            module, input_shape, as_strings=False, print_per_layer_stat=False, backend="pytorch"
        )
    if operations is None:
        reason = output.getvalue().strip().splitlines()[-1:] or ["no reason given"]
        raise UsageError(f"{name}: ptflops cannot count it ({reason[0]}); leave this backbone out")
    return int(operations)
