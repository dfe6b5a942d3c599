"""Where a network can be cut: its traced graph, with the shape of every feature map.

A network ends at its last feature map before the global pooling, as in the paper, or at the last one of a finer stride.
It can be cut only at a feature map through which all later layers get their input: at stride 16 of a ResNet-50 the sum
that leaves `layer3`, not the first convolution inside `layer4`, which a shortcut bypasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from opal_deploy.errors import UsageError, first_line

# what a backbone's body calls its output, and a coarser last feature map beside it
FEATURES, LAST = "features", "last"
# the names that torchvision's tracer gives to a global pooling: a module, a function, a mean over cells
_POOLING_NAMES = ("avgpool", "adaptive_avg_pool2d", "mean")
# divisible by every usual stride; tells a stride of 64 (7 cells) from padding (a 224-pixel input gives 4)
_PROBE_SIZE = 448
# not a multiple of 7: attention in windows of 7x7 cells refuses it
_SECOND_SIZE = 480
_ADVICE = "use a convolutional classifier such as resnet18"


@dataclass(frozen=True)
class Cut:
    """A feature map at which a network can end.

    Attributes:
        node: torchvision's name of the traced node, such as `layer3.5.relu_2`.
        num_features: D, channels of the feature map.
        stride: input pixels per cell, the same in both directions.
    """

    node: str
    num_features: int
    stride: int


def find_cut(name: str, model: nn.Module, stride: int | None, tracer_options: Mapping[str, Any]) -> Cut:
    """Return the feature map that a network ends with, or the last one of a stride.

    Args:
        name: the network's name, for errors.
        model: on the device `meta`; set to evaluation mode. A classifier's feature map is the input of its last global
            pooling; a network without a head returns it.
        stride: input pixels per cell; None for the network's own.
        tracer_options: `leaf_modules` and `autowrap_functions`, which are not traced through.

    Raises:
        UsageError: the network cannot be traced, or has no global pooling over a grid of cells that tile the image, or
            no feature map of this stride to cut at.
    """
    _check_sizes(name, model.eval())
    tracer, graph = _trace(name, model, tracer_options)
    nodes = list(graph.nodes)
    names = tracer.node_to_qualname
    with torch.no_grad():
        ShapeProp(fx.GraphModule(tracer.root, graph)).propagate(_empty_image(_PROBE_SIZE))
    # parameters (`get_attr`) are no feature maps
    results = {node: node.meta.get("tensor_meta") for node in nodes if node.op != "get_attr"}
    shapes = {node: list(result.shape) for node, result in results.items() if isinstance(result, TensorMetadata)}
    end = nodes[-1].args[0]
    if isinstance(end, fx.Node) and len(shapes.get(end, ())) == 2:  # logits
        end = nodes[_find_pooling_input(name, [names.get(node, "") for node in nodes])]
    last = _cut_at(names[end], shapes.get(end)) if isinstance(end, fx.Node) else None
    if last is None:
        shape = shapes.get(end) if isinstance(end, fx.Node) else "of several tensors"
        raise UsageError(f"backbone {name!r}: its features {shape} are no grid of cells that tile the image; {_ADVICE}")
    if stride is None or stride == last.stride:
        return last
    cuts = {
        cut.stride: cut
        for node in _bottlenecks(nodes[: nodes.index(end) + 1], shapes)
        if (cut := _cut_at(names.get(node, ""), shapes[node])) is not None
    }
    if stride not in cuts:
        raise UsageError(
            f"stride {stride}: {name} has no feature map of this stride that all later layers go through; it has "
            f"{', '.join(str(known) for known in sorted(cuts, reverse=True) if known > 1)}"
        )
    return cuts[stride]


def extract_classifier(name: str, model: nn.Module, node: str, tracer_options: Mapping[str, Any]) -> nn.Module:
    """Return the layers after a feature map: features [N, D, H, W] to logits [N, C].

    Args:
        name, tracer_options: see `find_cut`.
        model: a classifier; set to evaluation mode, and the result shares its layers under their names.
        node: the feature map, as `find_cut` names it.

    Raises:
        UsageError: the network cannot be traced, or its logits depend on more than this feature map.
    """
    tracer, traced = _trace(name, model.eval(), tracer_options)
    # the copy knows its modules, without which dead code is not recognised, and keeps the nodes' order
    graph = fx.GraphModule(tracer.root, traced).graph
    names = [tracer.node_to_qualname.get(traced_node) for traced_node in traced.nodes]
    nodes = dict(zip(names, list(graph.nodes), strict=True))
    with graph.inserting_before(next(iter(graph.nodes))):
        features = graph.placeholder("features")
    nodes[node].replace_all_uses_with(features)
    graph.eliminate_dead_code()
    for placeholder in list(graph.nodes):
        if placeholder.op == "placeholder" and placeholder is not features:
            if placeholder.users:
                raise UsageError(f"backbone {name!r}: its classifier needs several feature maps; use --head linear")
            graph.erase_node(placeholder)
    return fx.GraphModule(tracer.root, graph)


def _check_sizes(name: str, model: nn.Module) -> None:
    """Raise UsageError for a network that takes only certain image sizes."""
    for size in (_PROBE_SIZE, _SECOND_SIZE):
        try:
            with torch.no_grad():
                model(_empty_image(size))
        except Exception as error:  # the network's own: AssertionError, RuntimeError, ...
            raise UsageError(
                f"backbone {name!r} fails on {size}x{size} images ({first_line(error)}); {_ADVICE}"
            ) from None


def _empty_image(size: int) -> Tensor:
    return torch.empty(1, 3, size, size, device="meta")


def _trace(name: str, model: nn.Module, tracer_options: Mapping[str, Any]) -> tuple[Any, fx.Graph]:
    import torchvision
    from torchvision.models.feature_extraction import NodePathTracer

    # as in `create_feature_extractor`, so that the nodes get the same names
    operators = [
        kind for kind in vars(torchvision.ops).values() if isinstance(kind, type) and issubclass(kind, nn.Module)
    ]
    tracer = NodePathTracer(
        autowrap_modules=(math, torchvision.ops),
        autowrap_functions=tracer_options.get("autowrap_functions", ()),
        leaf_modules=[*operators, *tracer_options.get("leaf_modules", ())],
    )
    try:
        return tracer, tracer.trace(model)
    except Exception as error:  # the network's own code, run on symbols: TypeError, AssertionError, IndexError, ...
        raise UsageError(f"backbone {name!r}: its graph cannot be traced ({first_line(error)}); {_ADVICE}") from None


def _find_pooling_input(name: str, names: list[str]) -> int:
    """Return the index of the traced node that feeds the last global pooling."""
    for index in range(len(names) - 1, 0, -1):
        if names[index].rsplit(".", 1)[-1] in _POOLING_NAMES:
            return index - 1
    raise UsageError(f"backbone {name!r} has no global pooling over a grid of cells; {_ADVICE}")


def _bottlenecks(nodes: list[fx.Node], shapes: dict[fx.Node, list[int]]) -> Iterator[fx.Node]:
    """Yield the nodes, in order, through which all later nodes get their input."""
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
    """Return the cut at a node; None unless its output is a grid of at least 2 x 2 cells that tile the image."""
    if shape is None or len(shape) != 4 or shape[2] != shape[3] or shape[2] < 2 or _PROBE_SIZE % shape[2]:
        return None
    return Cut(node, shape[1], _PROBE_SIZE // shape[2])
