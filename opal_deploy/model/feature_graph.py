"""Where a network can be cut: its traced graph, with the shape of every feature map.

A network may end at its last feature map before the global pooling, as in the paper, or at the last one of a finer
stride. Only a feature map that all later layers depend on through nothing else is a place to cut: at stride 16 of a
ResNet-50 that is the sum that leaves `layer3`, not the first convolution inside `layer4`, which a shortcut goes around.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from opal_deploy.errors import UsageError

# the names that torchvision's tracer gives to a global pooling: a module, a function, a mean over cells
_POOLING_NAMES = ("avgpool", "adaptive_avg_pool2d", "mean")
_PROBE_SIZE = 224


@dataclass(frozen=True)
class Cut:
    """A feature map at which a network may end.

    Attributes:
        node: torchvision's name of the traced node, such as `layer3.5.relu_2`.
        num_features: D, channels of the feature map.
        stride: input pixels per cell, the same in both directions.
    """

    node: str
    num_features: int
    stride: int


def find_cut(name: str, model: nn.Module, stride: int | None = None) -> Cut:
    """Return the feature map that enters the last global pooling, or the last one of a stride before it.

    Args:
        name: the network's, for errors.
        model: the whole classifier on the device `meta`; it is set to evaluation mode.
        stride: input pixels per cell; None for the one that enters the pooling.

    Raises:
        UsageError: the network cannot be traced, has no global pooling over a grid of cells that tile the image, or
            no feature map of this stride that all later layers go through.
    """
    tracer, graph = _trace(name, model)
    nodes = list(graph.nodes)
    names = tracer.node_to_qualname
    end = _find_pooling_input(name, [names.get(node, "") for node in nodes])
    shapes = _ShapeRecorder(fx.GraphModule(tracer.root, graph))
    with torch.no_grad():
        shapes.run(torch.empty(1, 3, _PROBE_SIZE, _PROBE_SIZE, device="meta"))
    last = _cut_at(names[nodes[end]], shapes.shapes.get(nodes[end]))
    if last is None:
        raise UsageError(
            f"backbone {name!r}: a {_PROBE_SIZE}-pixel input gives features {shapes.shapes.get(nodes[end])}, whose "
            "cells do not tile the image; use a network with padded convolutions, such as resnet18"
        )
    if stride is None or stride == last.stride:
        return last
    cuts = {
        cut.stride: cut
        for node in _bottlenecks(nodes[: end + 1], shapes.shapes)
        if (cut := _cut_at(names.get(node, ""), shapes.shapes[node])) is not None
    }
    if stride not in cuts:
        raise UsageError(
            f"stride {stride}: {name} has no feature map of it that all later layers go through; it has "
            f"{', '.join(str(each) for each in sorted(cuts, reverse=True) if each > 1)}"
        )
    return cuts[stride]


class _ShapeRecorder(fx.Interpreter):
    """Runs a graph and keeps the shape of every tensor that a call gives."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, list[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        # parameters (`get_attr`) are no feature maps
        if isinstance(result, Tensor) and n.op != "get_attr":
            self.shapes[n] = list(result.shape)
        return result


def _trace(name: str, model: nn.Module) -> tuple[Any, fx.Graph]:
    import torchvision
    from torchvision.models.feature_extraction import NodePathTracer

    # what `create_feature_extractor` always traces with, so that it knows the nodes by the same names
    operators = [
        each for each in vars(torchvision.ops).values() if isinstance(each, type) and issubclass(each, nn.Module)
    ]
    tracer = NodePathTracer(autowrap_modules=(math, torchvision.ops), leaf_modules=operators)
    try:
        return tracer, tracer.trace(model.eval())
    except (fx.proxy.TraceError, RuntimeError, TypeError, ValueError):
        raise UsageError(f"backbone {name!r}: its graph cannot be traced, so its pooling cannot be found") from None


def _find_pooling_input(name: str, names: list[str]) -> int:
    """Return the index of the traced node that feeds the last global pooling."""
    for index in range(len(names) - 1, 0, -1):
        if names[index].rsplit(".", 1)[-1] in _POOLING_NAMES:
            return index - 1
    raise UsageError(
        f"backbone {name!r} has no global pooling over a grid of cells; "
        "use a convolutional classifier such as resnet18, efficientnet_v2_s or convnext_tiny"
    )


def _bottlenecks(nodes: list[fx.Node], shapes: dict[fx.Node, list[int]]) -> Iterator[fx.Node]:
    """Yield the nodes, in order, that everything after them depends on through nothing else."""
    position = {node: index for index, node in enumerate(nodes)}
    needed_until = -1
    for index, node in enumerate(nodes):
        if node not in shapes:
            continue
        if needed_until <= index:
            yield node
        users = [position.get(user, len(nodes)) for user in node.users]
        needed_until = max(needed_until, *users, index)


def _cut_at(node: str, shape: list[int] | None) -> Cut | None:
    """Return the cut at a node, or None where its output is no grid of at least 2 x 2 cells that tile the image."""
    if shape is None or len(shape) != 4 or shape[2] != shape[3] or shape[2] < 2 or _PROBE_SIZE % shape[2]:
        return None
    return Cut(node, shape[1], _PROBE_SIZE // shape[2])
