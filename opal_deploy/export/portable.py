"""Forms of operators that many runtimes know and compute right.

Graphs are traced and changed at opset 18, and become files at opset 17 (IR version 8) where it has their operators:
most converters and older runtimes know that one. Between the two, reductions differ: axes are an input from 18 on.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper

# of graphs while they are changed, and of files
OPSET, FILE_OPSET = 18, 17
# that of opset 17; onnx 1.23 writes 14 by default, which ONNX Runtime 1.31 rejects
IR_VERSION = 8
_OWN_DOMAINS = ("", "ai.onnx")
_REDUCTIONS = tuple(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)


def make_portable(graph: onnx.GraphProto) -> None:
    """Rewrite norms, sums and average pooling of a traced graph in place; the graph has the shapes of its values.

    The embedding's norm and sums over slots change by rounding only, everything else not at all.
    """
    described = (*graph.input, *graph.value_info, *graph.output)
    shapes = {value.name: [size.dim_value for size in value.type.tensor_type.shape.dim] for value in described}
    constants = _constants(graph)
    nodes = []
    for node in graph.node:
        shape = shapes.get(node.input[0], []) if node.input else []
        if node.op_type == "ReduceL2" and len(shape) == 2:
            nodes += _norm_as_product(graph, node, shape[1])
            continue
        if node.op_type == "ReduceSum" and len(shape) == 3 and _sums_last_axis(node, constants):
            nodes += _sum_as_product(graph, node, *shape[1:])
            continue
        if node.op_type == "AveragePool":
            _round_down(node, shape)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused_constants(graph)


def _norm_as_product(graph: onnx.GraphProto, node: onnx.NodeProto, width: int) -> list[onnx.NodeProto]:
    """Return nodes that compute |x| of each row of x [N, K] as sqrt(x² 1).

    MNN 3.6 reduces with ReduceL2 over the batch, too, and onnx2tf does not convert it. A sum by ReduceSum would depend
    on N in its last bit.
    """
    ones, squares, sums = (f"{node.output[0]}_{part}" for part in ("ones", "squares", "sum"))
    graph.initializer.append(numpy_helper.from_array(np.ones((width, 1), np.float32), ones))
    return [
        helper.make_node("Mul", [node.input[0], node.input[0]], [squares], name=squares),
        helper.make_node("MatMul", [squares, ones], [sums], name=sums),
        helper.make_node("Sqrt", [sums], [node.output[0]], name=node.name),
    ]


def _sums_last_axis(node: onnx.NodeProto, constants: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Return whether a ReduceSum of three axes leaves the first two."""
    keeps = next((attribute.i for attribute in node.attribute if attribute.name == "keepdims"), 1)
    return not keeps and len(node.input) == 2 and constants.get(node.input[1], np.array(0)).tolist() in ([2], [-1])


def _sum_as_product(graph: onnx.GraphProto, node: onnx.NodeProto, rows: int, width: int) -> list[onnx.NodeProto]:
    """Return nodes that compute the sums [N, rows] over the last axis of x [N, rows, width], as x 1.

    OpenVINO 2026.4 fuses a sum over slots with the arithmetic that follows, and reads what should be a constant per
    class, or in int8 files a plain number, by the image's place in the batch.
    """
    ones, shape, sums = (f"{node.output[0]}_{part}" for part in ("ones", "shape", "column"))
    graph.initializer.append(numpy_helper.from_array(np.ones((width, 1), np.float32), ones))
    graph.initializer.append(numpy_helper.from_array(np.array([-1, rows]), shape))
    return [
        helper.make_node("MatMul", [node.input[0], ones], [sums], name=sums),
        helper.make_node("Reshape", [sums, shape], [node.output[0]], name=node.name),
    ]


def _round_down(node: onnx.NodeProto, shape: list[int]) -> None:
    """Clear `ceil_mode`, with which IREE 3.13 pools wrongly, where the stride divides what the kernel leaves."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    padded_by_name = "auto_pad" in attributes and attributes["auto_pad"].s != b"NOTSET"
    if "ceil_mode" not in attributes or len(shape) != 4 or padded_by_name or "dilations" in attributes:
        return
    kernel, pads, strides = (
        list(attributes[name].ints) if name in attributes else default
        for name, default in (("kernel_shape", []), ("pads", [0] * 4), ("strides", [1, 1]))
    )
    left = [size + pads[axis] + pads[axis + 2] - kernel[axis] for axis, size in enumerate(shape[2:])]
    if all(size % stride == 0 for size, stride in zip(left, strides, strict=True)):
        attributes["ceil_mode"].i = 0


def to_file_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model of OPSET at FILE_OPSET; any other, or one with an operator that is newer, as it is."""
    if opset_of(model) != OPSET:
        return model
    changed = copy.deepcopy(model)
    constants = _constants(changed.graph)
    for node in changed.graph.node:
        if node.op_type in _REDUCTIONS and len(node.input) > 1:
            axes = constants[node.input.pop()]
            node.attribute.append(helper.make_attribute("axes", axes.tolist()))
            _drop_attribute(node, "noop_with_empty_axes")
        if node.op_type == "Split":
            # without sizes, parts are equal
            _drop_attribute(node, "num_outputs")
        if node.op_type == "Reshape" and 0 not in constants.get(node.input[1], [0]):
            # it says what a 0 means
            _drop_attribute(node, "allowzero")
        if not _is_in(FILE_OPSET, node):
            return model
    drop_unused_constants(changed.graph)
    set_opset(changed, FILE_OPSET)
    return changed


def from_file_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model of FILE_OPSET at OPSET; any other as it is."""
    if opset_of(model) != FILE_OPSET:
        return model
    changed = copy.deepcopy(model)
    for node in changed.graph.node:
        axes = next((attribute.ints for attribute in node.attribute if attribute.name == "axes"), None)
        if node.op_type in _REDUCTIONS and axes is not None:
            name = f"{node.output[0]}_axes"
            changed.graph.initializer.append(numpy_helper.from_array(np.array(axes, np.int64), name))
            _drop_attribute(node, "axes")
            node.input.append(name)
        if node.op_type == "Split" and len(node.input) == 1:
            node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
    set_opset(changed, OPSET)
    return changed


def _is_in(version: int, node: onnx.NodeProto) -> bool:
    """Return whether an opset has a node's operator with these attributes and inputs."""
    if node.domain not in _OWN_DOMAINS:
        return True
    try:
        schema = defs.get_schema(node.op_type, version)
    except defs.SchemaError:
        return False
    attributes = {attribute.name for attribute in node.attribute}
    return len(node.input) <= schema.max_input and attributes <= set(schema.attributes)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset of ONNX's own operators."""
    return int(max(opset.version for opset in model.opset_import if opset.domain in _OWN_DOMAINS))


def set_opset(model: onnx.ModelProto, version: int) -> None:
    """Declare another opset of ONNX's own operators."""
    for opset in model.opset_import:
        if opset.domain in _OWN_DOMAINS:
            opset.version = version


def _constants(graph: onnx.GraphProto) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def _drop_attribute(node: onnx.NodeProto, name: str) -> None:
    for attribute in [attribute for attribute in node.attribute if attribute.name == name]:
        node.attribute.remove(attribute)


def drop_unused_constants(graph: onnx.GraphProto) -> None:
    used = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
