"""The end of somebody's classifier, found in its ONNX graph, and the exact share that each cell has in a logit.

Where a classifier ends in a mean over the cells of a feature map F [N, D, H, W], perhaps a LayerNorm, and a dense
layer,

    logit_c = b_c + sum over cells (u, v) of W_c . F(u, v) / (H W)

so every cell has a share of the logit, and the shares and the bias add up to it. With LayerNorm after the mean, W_c is
multiplied by its weights, centred over the channels and divided by the mean vector's deviation, which depends on the
image alone; its biases add W_c . beta to b_c. A quantised file rounds the mean: what rounding adds to a channel's mean
is divided among the cells in proportion to |F|. The original nodes stay as they are: `add_shares` only adds nodes
behind them, so the logits are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT
from opal_deploy.errors import UsageError
from opal_deploy.export.graph_edit import GraphBuilder, declare_outputs, producers, strip_traces

Activation = Literal["softmax", "sigmoid", "none"]
# in front of the names of what is added, and of what was there
_PREFIX, _OWN = "shares_", "own_"
# nodes that change no value between the map and the logits
_PASSED = {"Identity", "Dropout", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Transpose"}
# nodes behind which exporters store weights
_ROUNDING = {"QuantizeLinear", "DequantizeLinear"}
_FOLDED = {"Constant", "Identity", "Cast", "Transpose", "Reshape", *_ROUNDING}
_OPSET = 13


@dataclass(frozen=True)
class Tail:
    """The end of a classifier.

    Attributes:
        features: name of F's value; F may have one axis of tokens instead of H and W.
        channels_last: whether F is [N, H, W, D].
        logits: name of the logits' value.
        weights: W [C, D], with LayerNorm's weights in it, centred; float64.
        biases: b [C] with LayerNorm's biases in it; float64.
        normalised: name of the vector that LayerNorm divides by its deviation; empty without one after the mean.
        epsilon: LayerNorm's.
        rounded: name of the vector that the mean is rounded to; empty where it is not.
        is_binary: whether one logit l stands for two classes, which get -l / 2 and l / 2: their softmax is l's sigmoid.
        activation: what follows the logits.
    """

    features: str
    channels_last: bool
    logits: str
    weights: NDArray[np.float64]
    biases: NDArray[np.float64]
    normalised: str
    epsilon: float
    rounded: str
    is_binary: bool
    activation: Activation


class OwnInput(NamedTuple):
    """A classifier's own input: name, (H0, W0), axis and order (B, G, R) of channels, element type, a fixed batch."""

    name: str
    size: tuple[int, int]
    channels_last: bool
    is_bgr: bool
    kind: int
    batch: int | None


class _Graph:
    """A graph's nodes by their outputs, and its constants."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.node = producers(model.graph).get
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return a constant's value, also behind the operators of `_FOLDED`; None for what depends on the image."""
        if name in self._tensors:
            return numpy_helper.to_array(self._tensors[name])
        node = self.node(name)
        if node is None or node.op_type not in _FOLDED:
            return None
        values = {given: self.constant(given) for given in node.input if given}
        if any(value is None for value in values.values()):
            return None
        (value,) = cast(list[NDArray[Any]], ReferenceEvaluator(node).run(None, values))
        return value

    def split(self, node: onnx.NodeProto) -> tuple[str, NDArray[Any]] | None:
        """Return the variable and the constant input of a node with one of each."""
        constants = [self.constant(name) for name in node.input[:2]]
        for place in (0, 1):
            other, value = constants[1 - place], constants[place]
            if value is not None and other is None:
                return node.input[1 - place], value
        return None


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def check_graph(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    """Return a graph's only input; raise UsageError for one that cannot be read or run safely."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < _OPSET:
        raise UsageError(f"{name}: opset {opset} found; expected {_OPSET} or newer: export it again with a newer opset")
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs: list[onnx.ValueInfoProto] = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) != 1:
        names = ", ".join(value.name for value in inputs)[:99]
        raise UsageError(f"{name}: {len(inputs)} inputs found ({names}); expected one, the images")
    return inputs[0]


def find_tail(model: onnx.ModelProto, name: str) -> Tail:
    """Return the end of a classifier; raise UsageError, which says what was found instead, for one without shares."""
    graph = _Graph(model)
    at, activation = model.graph.output[0].name, "none"
    # from the output to the dense layer; a quantised file's last rounding is of the logits
    passed = (*_PASSED, *_ROUNDING, "Softmax", "LogSoftmax", "Sigmoid")
    while (node := graph.node(at)) is not None and node.op_type in passed:
        if "Softmax" in node.op_type or node.op_type == "Sigmoid":
            activation = "sigmoid" if node.op_type == "Sigmoid" else "softmax"
        at = node.input[0]
    logits = at
    dense = _read_dense(graph, at)
    if dense is None and node is not None and _read_mean(graph, node) is not None:
        # as in SqueezeNet, each class has a map of its own, whose mean is the logit
        sides = [side.dim_value for side in model.graph.output[0].type.tensor_type.shape.dim]
        count = sides[1] if len(sides) > 1 else 0
        dense = (at, np.eye(count), np.zeros(count)) if count else None
    if dense is None:
        last, advice = "nothing" if node is None else node.op_type, ""
        if any(other.op_type == "MatMulInteger" for other in model.graph.node):
            last, advice = "MatMulInteger", "; export it before it is quantised, or quantise with QDQ"
        raise UsageError(f"{name}: its output comes from {last}; expected a dense layer on a map's mean{advice}")
    at, weights, biases = dense
    # from the dense layer to the mean over cells
    vector, is_rounded = at, False
    normalised, epsilon = "", 0.0
    while True:
        node = graph.node(at)
        if node is None:
            raise UsageError(f"{name}: its dense layer reads the input; expected the mean of a feature map")
        if (pooled := _read_mean(graph, node)) is not None:
            features, channels_last = pooled
            break
        if not normalised and not is_rounded and (norm := _read_layer_norm(graph, node)) is not None:
            normalised, gamma, beta, epsilon = norm
            biases = biases + weights @ beta
            weights = weights * gamma
            weights = weights - weights.mean(axis=1, keepdims=True)
            at = vector = normalised
        elif node.op_type in (*_PASSED, *_ROUNDING) or _is_restrided(graph, node):
            is_rounded = is_rounded or node.op_type in _ROUNDING
            at = node.input[0]
        else:
            raise UsageError(_refuse(name, graph, node))
    is_binary = len(weights) == 1
    if is_binary:
        weights, biases, activation = np.concatenate([-weights, weights]) / 2, np.append(-biases, biases) / 2, "softmax"
    return Tail(
        features, channels_last, logits, weights, biases, normalised, epsilon, vector if is_rounded else "", is_binary,
        cast(Activation, activation),
    )  # fmt: skip


def _refuse(name: str, graph: _Graph, node: onnx.NodeProto) -> str:
    """Return the error for a node before the dense layer that leaves the cells no exact share."""
    between, pooled = [node], False
    while not pooled and (source := graph.node(between[-1].input[0])) is not None:
        pooled = _read_mean(graph, source) is not None
        between.append(source)
    hidden = [other.op_type for other in between if other.op_type in ("Conv", "Gemm", "MatMul")]
    reason = f"an activation ({node.op_type}) follows the pooling"
    if node.op_type in ("Gather", "Slice"):
        reason = "one token is read, not a mean over cells"
    elif not pooled:
        reason = f"its dense layer reads {node.op_type}, not the mean of a feature map"
    elif hidden or node.op_type == "Add":
        reason = f"a hidden layer ({node.op_type}) follows the pooling"
    return (
        f"{name}: {reason}, so its cells have no exact share of the logit; train an OPAL head on its backbone: "
        "opal-deploy train DATA --backbone NAME --weights FILE"
    )


def _is_restrided(graph: _Graph, node: onnx.NodeProto) -> bool:
    """Return whether a node reads a flat tensor in another order, as PyTorch exports `as_strided`; the gate decides."""
    flat = graph.node(node.input[0])
    return node.op_type == "Gather" and flat is not None and flat.op_type == "Reshape"


def _read_dense(graph: _Graph, at: str) -> tuple[str, NDArray[np.float64], NDArray[np.float64]] | None:
    """Return input, W [C, D] and b [C] of the dense layer that computes a value; None if it is none."""
    node, biases = graph.node(at), None
    if node is not None and node.op_type == "Add" and (parts := graph.split(node)) is not None:
        at, biases = parts[0], parts[1].astype(np.float64).ravel()
        while (node := graph.node(at)) is not None and node.op_type in _PASSED:
            at = node.input[0]
    if node is None or node.op_type not in ("Gemm", "MatMul", "Conv"):
        return None
    weights = graph.constant(node.input[1])
    if weights is None:
        return None
    weights = weights.astype(np.float64)
    if node.op_type == "Gemm":
        if _attribute(node, "transA", 0):
            return None
        weights = (weights if _attribute(node, "transB", 0) else weights.T) * _attribute(node, "alpha", 1.0)
    elif node.op_type == "MatMul":
        weights = weights.T
    elif weights.shape[2:] == (1, 1) and _attribute(node, "group", 1) == 1:
        weights = weights[:, :, 0, 0]
    if weights.ndim != 2:
        return None
    if len(node.input) > 2 and node.input[2]:
        own = graph.constant(node.input[2])
        if own is None:
            return None
        scaled = own.astype(np.float64).ravel() * (_attribute(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0)
        biases = scaled if biases is None else biases + scaled
    count = len(weights)
    biases = np.zeros(count) if biases is None else np.broadcast_to(biases, (count,))
    return node.input[0], weights, biases


def _read_mean(graph: _Graph, node: onnx.NodeProto) -> tuple[str, bool] | None:
    """Return the map that a node takes the mean over the cells of, and whether its channels are last; None if none."""
    # over the whole map, which is checked when the file is run
    is_average = node.op_type == "AveragePool" and not any(_attribute(node, "pads", [0]))
    if is_average or node.op_type == "GlobalAveragePool":
        return node.input[0], False
    if node.op_type != "ReduceMean":
        return None
    values = graph.constant(node.input[1]) if len(node.input) > 1 else _attribute(node, "axes", None)
    axes = [] if values is None else sorted(np.ravel(values).tolist())
    # the mean over one axis is over tokens
    channels_first = axes in ([2, 3], [-2, -1], [-1, 2], [2], [-1])
    return (node.input[0], not channels_first) if channels_first or axes in ([1, 2], [-3, -2], [1], [-2]) else None


def _read_layer_norm(
    graph: _Graph, node: onnx.NodeProto
) -> tuple[str, NDArray[np.float64], NDArray[np.float64], float] | None:
    """Return input, weights, biases and epsilon of a LayerNorm, one operator or many; None if a node ends none."""

    def variable(node: onnx.NodeProto | None, kind: str) -> tuple[onnx.NodeProto | None, NDArray[Any] | None]:
        """Return what computes the variable input of a node of a kind with a constant, and the constant."""
        if node is None or node.op_type != kind or (parts := graph.split(node)) is None:
            return None, None
        return graph.node(parts[0]), parts[1]

    if node.op_type == "LayerNormalization":
        gamma = graph.constant(node.input[1])
        beta = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
        if gamma is None or beta is None:
            return None
        return node.input[0], gamma.ravel() + 0.0, beta.ravel() + 0.0, _attribute(node, "epsilon", 1e-5)
    scaled, beta = variable(node, "Add")
    divided, gamma = variable(scaled, "Mul")
    if divided is None or divided.op_type != "Div" or gamma is None or beta is None:
        return None
    centred, deviation = graph.node(divided.input[0]), graph.node(divided.input[1])
    if centred is None or centred.op_type != "Sub" or deviation is None or deviation.op_type != "Sqrt":
        return None
    _, epsilon = variable(graph.node(deviation.input[0]), "Add")
    mean = graph.node(centred.input[1])
    if epsilon is None or mean is None or mean.op_type != "ReduceMean" or mean.input[0] != centred.input[0]:
        return None
    return centred.input[0], gamma.ravel() + 0.0, beta.ravel() + 0.0, float(epsilon.ravel()[0])


def add_shares(model: onnx.ModelProto, tail: Tail, metadata: Metadata) -> onnx.ModelProto:
    """Return a copy with the outputs `logits`, `share_classes` and `shares`; its own names begin with `own_`."""
    # a classifier may have values and nodes of any names, such as `logits`
    changed = onnx.compose.add_prefix(model, _OWN)
    strip_traces(changed)
    graph, (height, width) = changed.graph, metadata.grid
    cells, (count, channels) = height * width, tail.weights.shape
    builder = GraphBuilder(graph, _PREFIX, metadata.outputs)
    constant, add, reshape = builder.constant, builder.node, builder.reshape

    def average(name: str, value: str, length: int) -> str:
        """Add the mean over the last axis, of a length."""
        return add("MatMul", name, value, constant(f"{name}_weights", np.full((length, 1), 1 / length, np.float32)))

    rows = reshape("logits_rows", _OWN + tail.logits, -1, 1 if tail.is_binary else count)
    logits = add("Cast", "logit" if tail.is_binary else "logits", rows, to=TensorProto.FLOAT)
    if tail.is_binary:
        logits = add("Mul", "logits", logits, constant("halves", np.array([[-0.5, 0.5]], np.float32)))
    best = [_PREFIX + "best", _PREFIX + "ids"]
    k = constant("k", np.array([metadata.num_shared], np.int64))
    graph.node.append(helper.make_node("TopK", [logits, k], best, name=_PREFIX + "top"))
    add("Cast", "share_classes", best[1], to=TensorProto.INT32)
    weights = constant("weights", (tail.weights / cells).astype(np.float32))
    chosen = add("Gather", "chosen", weights, best[1], axis=0)  # [N, k, D]
    features = add("Cast", "features", _OWN + tail.features, to=TensorProto.FLOAT)
    if tail.channels_last:
        features = add("Transpose", "columns", reshape("rows", features, 0, cells, channels), perm=[0, 2, 1])
    else:
        features = reshape("columns", features, 0, channels, cells)
    if tail.rounded:
        vector = add("Cast", "rounded", _OWN + tail.rounded, to=TensorProto.FLOAT)
        vector = reshape("rounded_rows", vector, -1, channels, 1)
        added = add("Sub", "added", vector, average("cell_mean", features, cells))
        sizes = add("Abs", "sizes", features)
        # a channel that is 0 everywhere is rounded to 0
        least = constant("least", np.array(1e-30, np.float32))
        mean = add("Add", "mean_size", average("cell_sizes", sizes, cells), least)
        features = add("Add", "whole", features, add("Mul", "parts", sizes, add("Div", "of_size", added, mean)))
    shares = add("MatMul", "products", chosen, features)
    if tail.normalised:
        vector = add("Cast", "vector", _OWN + tail.normalised, to=TensorProto.FLOAT)
        vector = reshape("vector_rows", vector, -1, channels)
        centred = add("Sub", "centred", vector, average("mean", vector, channels))
        variance = average("variance", add("Mul", "squares", centred, centred), channels)
        shifted = add("Add", "shifted", variance, constant("epsilon", np.array(tail.epsilon, np.float32)))
        shares = add("Div", "divided", shares, reshape("deviation", add("Sqrt", "root", shifted), -1, 1, 1))
    reshape("shares", shares, 0, 0, height, width)
    declare_outputs(graph, metadata)
    return changed


def set_input(model: onnx.ModelProto, own: OwnInput) -> None:
    """Give a graph, in place, the input `images`, float32 [N, 3, H0, W0], RGB, in front of its own input."""
    graph = model.graph
    at, nodes = INPUT, []
    if own.is_bgr:
        graph.initializer.append(numpy_helper.from_array(np.array([2, 1, 0]), f"{_PREFIX}bgr"))
        nodes.append(helper.make_node("Gather", [at, f"{_PREFIX}bgr"], [f"{_PREFIX}reversed"], axis=1))
        at = f"{_PREFIX}reversed"
    if own.channels_last:
        nodes.append(helper.make_node("Transpose", [at], [f"{_PREFIX}last"], perm=[0, 2, 3, 1]))
        at = f"{_PREFIX}last"
    nodes.append(helper.make_node("Cast", [at], [_OWN + own.name], to=own.kind))
    old = list(graph.node)
    # what was traced for its own batch
    del graph.node[:], graph.input[:], graph.value_info[:]
    graph.node.extend([*nodes, *old])
    graph.input.append(helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["N", 3, *own.size]))
