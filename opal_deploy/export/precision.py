"""Narrow floating-point types on the ONNX graph itself: float16 and bfloat16 (docs/precision.md).

The body, from the normalised images to the projection, is cast; softmax, maximum and everything after them stay
float32. bfloat16 has 8 significant bits: a projection rounded to that makes neighbouring cells equal, so it stays
float32. Converters such as onnxconverter-common cast the head too, and do not know bfloat16.

ONNX Runtime has no bfloat16 convolutions on CPUs, and its float16 there is float32 arithmetic between two casts:
300 * 300 does not overflow. `simulate_low_precision` keeps values in float32 and rounds each to the narrow type after
every operation, as a GPU stores it between kernels; sums inside one operation are float32's, as in a tensor core.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.errors import ArtifactError
from opal_deploy.export.graph_edit import BODY_OUTPUT, body_input, body_nodes, producers, projection_input
from opal_deploy.export.portable import opset_of, set_opset

# convolutions take bfloat16 from this opset on; no other operator of our graphs changed
_BF16_OPSET, _BF16_IR_VERSION = 22, 10
_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# operators that move values without changing them
_EXACT = {
    "Cast", "Concat", "Flatten", "Gather", "Identity", "MaxPool", "Range", "Relu", "Reshape", "Shape", "Slice", "Split",
    "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip


@dataclass(frozen=True)
class FloatType:
    """A narrow floating-point type: its names in ONNX and numpy, and its largest finite value."""

    name: str
    onnx_type: int
    numpy_type: Any
    largest: float


FP16 = FloatType("fp16", TensorProto.FLOAT16, np.float16, 65504.0)
BF16 = FloatType("bf16", TensorProto.BFLOAT16, ml_dtypes.bfloat16, 3.3895313892515355e38)


def to_fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a float32 graph with its body in float16; ArtifactError for a weight beyond float16's range."""
    return _cast_body(model, FP16, BODY_OUTPUT)


def to_bf16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a float32 graph with its backbone in bfloat16, at opset 22.

    ONNX Runtime has no bfloat16 convolution for CPUs: the file is for OpenVINO and TensorRT.

    Raises:
        ArtifactError: the graph does not name its body.
    """
    cast = _cast_body(model, BF16, projection_input(model.graph))
    set_opset(cast, max(opset_of(cast), _BF16_OPSET))
    cast.ir_version = max(cast.ir_version, _BF16_IR_VERSION)
    return cast


def _cast_body(model: onnx.ModelProto, to: FloatType, end: str) -> onnx.ModelProto:
    cast = copy.deepcopy(model)
    graph = cast.graph
    start = body_input(graph)
    body = body_nodes(graph, end)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    outside = {name for node in graph.node if node.output[0] not in body for name in node.input}
    cast_in, cast_out = f"{start}_{to.name}", f"{end}_{to.name}"
    converted: dict[str, str] = {}
    # features, from which the OOD score is computed
    inner = {name for node in graph.node if node.output[0] in body for name in node.output if name != end}
    for node in graph.node:
        if node.output[0] not in body:
            node.input[:] = [f"{name}_back" if name in inner else name for name in node.input]
            continue
        for index, name in enumerate(node.input):
            if name == start:
                node.input[index] = cast_in
            elif name == end:
                node.input[index] = cast_out
            elif name in weights and weights[name].data_type == TensorProto.FLOAT:
                if name not in converted:
                    converted[name] = _convert(graph, weights[name], to, shared=name in outside)
                node.input[index] = converted[name]
        node.output[:] = [cast_out if name == end else name for name in node.output]
        _retype(node, to)
    nodes = list(graph.node)
    first = min(i for i, node in enumerate(nodes) if cast_in in node.input)
    last = max(i for i, node in enumerate(nodes) if cast_out in node.output)
    nodes.insert(last + 1, helper.make_node("Cast", [cast_out], [end], name=f"{cast_out}_back", to=TensorProto.FLOAT))
    for name in sorted(inner & outside):
        made = next(i for i, node in enumerate(nodes) if name in node.output)
        nodes.insert(
            made + 1, helper.make_node("Cast", [name], [f"{name}_back"], name=f"{name}_back", to=TensorProto.FLOAT)
        )
    nodes.insert(first, helper.make_node("Cast", [start], [cast_in], name=cast_in, to=to.onnx_type))
    del graph.node[:]
    graph.node.extend(nodes)
    return cast


def _convert(graph: onnx.GraphProto, tensor: onnx.TensorProto, to: FloatType, *, shared: bool) -> str:
    """Change a weight's type, or add a narrow copy where float32 nodes read the weight too; return the name to read."""
    values = numpy_helper.to_array(tensor)
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    if largest > to.largest:
        raise ArtifactError(f"weight {tensor.name} reaches {largest:.3g}, beyond {to.name}'s {to.largest:g}; keep fp32")
    name = f"{tensor.name}_{to.name}" if shared else tensor.name
    narrowed = numpy_helper.from_array(values.astype(to.numpy_type), name)
    if shared:
        graph.initializer.append(narrowed)
    else:
        tensor.CopyFrom(narrowed)
    return name


def _retype(node: onnx.NodeProto, to: FloatType) -> None:
    """Narrow the attributes of a node that carry a float32 type or tensor."""
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = to.onnx_type
        if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(attribute.t).astype(to.numpy_type)
            attribute.t.CopyFrom(numpy_helper.from_array(values, attribute.t.name))


def simulate_low_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 graph with the outputs of a graph with a float16 or bfloat16 body, for any ONNX Runtime.

    Values keep their names.
    """
    simulated = copy.deepcopy(model)
    graph = simulated.graph
    for tensor in graph.initializer:
        if tensor.data_type in _NARROW:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    narrow = _narrow_values(model)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.data_type in _NARROW:
                widened = numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(numpy_helper.from_array(widened, attribute.t.name))
        narrowing = node.op_type == "Cast" and node.attribute[0].i in _NARROW
        rounded = [name for name in node.output if name in narrow and (narrowing or node.op_type not in _EXACT)]
        if narrowing:
            node.attribute[0].i = TensorProto.FLOAT
        node.output[:] = [f"{name}_unrounded" if name in rounded else name for name in node.output]
        nodes.append(node)
        for name in rounded:
            nodes += [
                helper.make_node("Cast", [f"{name}_unrounded"], [f"{name}_narrow"], to=narrow[name]),
                helper.make_node("Cast", [f"{name}_narrow"], [name], to=TensorProto.FLOAT),
            ]
    del graph.node[:]
    graph.node.extend(nodes)
    return simulated


def _narrow_values(model: onnx.ModelProto) -> dict[str, int]:
    """Return the values of a narrow type, with that type."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    unknown = [name for name in producers(model.graph) if name and name not in types]
    if unknown:
        raise RuntimeError(f"ONNX infers no type for {unknown[:3]}")
    return {name: kind for name, kind in types.items() if kind in _NARROW}
