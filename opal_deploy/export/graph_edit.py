"""Edits of an exported ONNX graph: finding its body, choosing outputs, dropping slots, selecting the best classes.

The body reaches from the normalised images to the projection; the head after it always stays float32.

`add_top_outputs` selects the k best classes in the graph, so that all other channels stay on the device. The selection
is exact and the same in every runtime: maxima and comparisons of the graph's own logits. The operator TopK would not
do, since runtimes differ in which of two equal logits they list first. The nodes come after the float32 head and are
added after the body was converted, so a precision changes nothing in them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata
from opal_deploy.artifact.opal_head import head_constant
from opal_deploy.artifact.outputs import INPUT, tensor_specs
from opal_deploy.errors import ArtifactError

# names of the values at the two ends of the body
BODY_INPUT = "normalised"
BODY_OUTPUT = "projected"  # `model.graph.PROJECTED`, without importing torch
# the head's constants, by their names in the network (`model.head`)
ANCHORS, KEPT = "network.head.anchors", "network.head.kept"
# of a linear head (`model.linear_head`)
CLASS_WEIGHTS = "network.head.class_weights"
# a taken class is never the best again; logits are far above this
_LOWEST = float(np.finfo(np.float32).min)
_PREFIX = "select_"


def body_input(graph: onnx.GraphProto) -> str:
    """Return the name of the normalised images: BODY_INPUT, or the graph's input where that is normalised."""
    return BODY_INPUT if any(BODY_INPUT in node.output for node in graph.node) else "images"


def producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return the node that computes each value, by the value's name."""
    return {name: node for node in graph.node for name in node.output}


def nodes_of(graph: onnx.GraphProto, names: Iterable[str], start: str | None = None) -> set[str]:
    """Return the nodes that compute these values, from the value `start` if given; each by its first output's name."""
    made_by = producers(graph)
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        node = made_by.get(name)
        if node is None or name == start or node.output[0] in found:
            continue
        found.add(node.output[0])
        pending.extend(node.input)
    return found


def body_nodes(graph: onnx.GraphProto, end: str) -> set[str]:
    """Return the nodes that compute `end`, a value of the body, from the normalised images; else ArtifactError."""
    if BODY_OUTPUT not in producers(graph):
        raise ArtifactError(f"the graph has no {BODY_OUTPUT!r}; expected a file that `opal-deploy export` wrote")
    return nodes_of(graph, [end], body_input(graph))


def projection_input(graph: onnx.GraphProto) -> str:
    """Return the name of the features that enter the projection; BODY_OUTPUT where there is no projection."""
    node = producers(graph).get(BODY_OUTPUT)
    return node.input[0] if node is not None and node.op_type == "Conv" else BODY_OUTPUT


def strip_traces(model: onnx.ModelProto) -> None:
    """Remove, in place, the stack traces with the exporting machine's paths that PyTorch leaves in every node."""
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    model.doc_string = model.graph.doc_string = ""


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy of a model whose outputs are these values, whatever their types, without nodes that none needs."""
    changed, wanted = copy.deepcopy(model), list(names)
    needed = nodes_of(changed.graph, wanted)
    nodes = [node for node in changed.graph.node if node.output[0] in needed]
    read = {name for node in nodes for name in node.input}
    constants = [tensor for tensor in changed.graph.initializer if tensor.name in read]
    del changed.graph.node[:], changed.graph.initializer[:], changed.graph.output[:]
    changed.graph.node.extend(nodes)
    changed.graph.initializer.extend(constants)
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    return changed


def with_class_map(model: onnx.ModelProto, metadata: Metadata) -> onnx.ModelProto:
    """Return a copy of a model with an exact head that has this map: the constants of its head are replaced.

    Raises:
        ArtifactError: the graph does not have the constants, since another version exported it.
    """
    changed, class_map = copy.deepcopy(model), metadata.class_map
    constants = {tensor.name: tensor for tensor in changed.graph.initializer}
    if not metadata.is_opal:
        name, value = CLASS_WEIGHTS, np.ascontiguousarray(class_map.matrix.T, np.float32)
        if not metadata.shares_prototypes:
            # the classifier's own logits lose the scores of dropped slots
            name, value = KEPT, class_map.kept_prototypes[None].astype(np.float32)
        if name not in constants:
            raise ArtifactError("its graph has no constant for the class weights; export the checkpoint again")
        constants[name].CopyFrom(numpy_helper.from_array(value, name))
        return changed
    if ANCHORS not in constants:
        raise ArtifactError("its graph has no constant for the anchors; export the checkpoint again, and edit that")
    values = {ANCHORS: head_constant(class_map, metadata.distance), KEPT: class_map.kept_prototypes[:, None]}
    for name, constant in values.items():
        if name in constants:
            constants[name].CopyFrom(numpy_helper.from_array(constant.astype(np.float32), name))
        else:
            changed.graph.initializer.append(numpy_helper.from_array(constant.astype(np.float32), name))
    if KEPT not in constants:
        number, pooling = next((i, node) for i, node in enumerate(changed.graph.node) if "scores" in node.output)
        mask = helper.make_node("Mul", [pooling.input[0], KEPT], ["kept_attention"], name="kept_attention")
        pooling.input[0] = mask.output[0]
        changed.graph.node.insert(number, mask)
    return changed


def add_top_outputs(model: onnx.ModelProto, class_map: ClassMap, k: int) -> onnx.ModelProto:
    """Return a copy of a model with TOP_OUTPUTS, computed from its outputs `logits`, `scores` and `argmax`.

    The model has opset 18 or later, and `logits` as its first output; k is C at most.
    """
    changed, slots = copy.deepcopy(model), class_map.max_slots
    _add_selection(GraphBuilder(changed.graph, _PREFIX, TOP_OUTPUTS), class_map, k)
    batch = changed.graph.output[0].type.tensor_type.shape.dim[0].dim_param
    shapes: dict[str, tuple[int, list[Any]]] = {
        "top_classes": (TensorProto.INT32, [batch, k]),
        "top_logits": (TensorProto.FLOAT, [batch, k]),
        "top_scores": (TensorProto.FLOAT, [batch, k, slots]),
        "top_cells": (TensorProto.INT32, [batch, k, slots]),
        "score_norm": (TensorProto.FLOAT, [batch]),
    }
    changed.graph.output.extend(helper.make_tensor_value_info(name, *shapes[name]) for name in TOP_OUTPUTS)
    return changed


def _add_selection(graph: GraphBuilder, class_map: ClassMap, k: int) -> None:
    """Add the nodes that compute TOP_OUTPUTS."""
    num_classes, num_prototypes, slots = class_map.num_classes, class_map.num_prototypes, class_map.max_slots
    class_ids = graph.constant("class_ids", np.arange(num_classes, dtype=np.int32)[None])
    # where no logit equals the maximum, since all are NaN, the last class is listed with its NaN
    last = graph.constant("last", np.array([[num_classes - 1]], np.int32))
    lowest = graph.constant("lowest", np.array([[_LOWEST]], np.float32))
    axis_1 = graph.constant("axis_1", np.array([1], np.int64))
    remaining = "logits"
    logits, classes = [], []
    for place in range(k):
        best = graph.node("ReduceMax", f"best_{place}", remaining, axis_1, keepdims=1)  # [N, 1]
        is_best = graph.node("Equal", f"is_best_{place}", remaining, best)
        candidates = graph.node("Where", f"candidates_{place}", is_best, class_ids, last)
        # of equal logits the lowest class
        first = graph.node("ReduceMin", f"class_{place}", candidates, axis_1, keepdims=1)  # [N, 1]
        logits.append(best)
        classes.append(first)
        if place < k - 1:
            is_taken = graph.node("Equal", f"is_taken_{place}", class_ids, first)
            remaining = graph.node("Where", f"remaining_{place}", is_taken, lowest, remaining)
    graph.node("Concat", "top_logits", *logits, axis=1)
    graph.node("Concat", "top_classes", *classes, axis=1)

    # |s| as the norm of the norms of about sqrt(K) parts: ONNX Runtime's ReduceL2 adds up one after another, which over
    # thousands of channels loses more than 1e-6. Its ReduceSum would depend on N in the last bit
    parts = max(divisor for divisor in range(1, math.isqrt(num_prototypes) + 1) if num_prototypes % divisor == 0)
    blocks = graph.reshape("parts", "scores", 0, parts, num_prototypes // parts)
    axis_2 = graph.constant("axis_2", np.array([2], np.int64))
    part_norms = graph.node("ReduceL2", "part_norms", blocks, axis_2, keepdims=0)
    graph.node("ReduceL2", "score_norm", part_norms, axis_1, keepdims=0)

    table = graph.constant("channel_table", class_map.channel_table.astype(np.int32))
    channels = graph.node("Gather", "channels", table, "top_classes", axis=0)  # [N, k, S]
    flat = graph.reshape("flat_channels", channels, 0, k * slots)
    for source, name in (("scores", "top_scores"), ("argmax", "top_cells")):
        graph.reshape(name, graph.node("GatherElements", f"taken_{source}", source, flat, axis=1), 0, k, slots)


def declare_outputs(graph: onnx.GraphProto, metadata: Metadata) -> None:
    """Give a graph, in place, the outputs that its metadata promises, for any number of images."""
    del graph.output[:]
    for name, (shape, dtype) in tensor_specs(metadata).items():
        if name != INPUT:
            kind = helper.np_dtype_to_tensor_dtype(dtype)
            graph.output.append(helper.make_tensor_value_info(name, kind, ["N", *shape]))


class GraphBuilder:
    """Appends nodes, named as their outputs, and constants to a graph; values other than these outputs get a prefix."""

    def __init__(self, graph: onnx.GraphProto, prefix: str, outputs: Container[str]) -> None:
        self._graph, self._prefix, self._outputs = graph, prefix, outputs

    def constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """Add an initializer and return its name."""
        self._graph.initializer.append(numpy_helper.from_array(value, self._prefix + name))
        return self._prefix + name

    def node(self, operator: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        output = name if name in self._outputs else self._prefix + name
        self._graph.node.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def reshape(self, name: str, value: str, *shape: int) -> str:
        """Add a node that gives a value another shape, with ONNX's 0 and -1, and return the name of its output."""
        return self.node("Reshape", name, value, self.constant(f"{name}_shape", np.array(shape, np.int64)))
