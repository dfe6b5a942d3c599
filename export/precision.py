"""Half precision, on the ONNX graph itself, so that a target machine needs no torch for it.

The body, from the normalised picture to the projection, is cast; softmax, maximum and everything behind them stay
float32. TensorRT 11 builds strongly typed networks only, so precision is a property of this graph and of nothing else.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.errors import ArtifactError

# the values that `export.graph` names: where the body begins and ends
BODY_INPUT = "normalised"
BODY_OUTPUT = "projected"

_HALF_MAX = float(np.finfo(np.float16).max)


def to_fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a float32 graph with its body in float16.

    Raises:
        ArtifactError: the graph does not name its body, or a weight is beyond float16's range.
    """
    half = onnx.ModelProto()
    half.CopyFrom(model)
    graph = half.graph
    start = BODY_INPUT if any(BODY_INPUT in node.output for node in graph.node) else "images"
    body = _nodes_between(graph, start, BODY_OUTPUT)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    outside = {name for node in graph.node if node.output[0] not in body for name in node.input}
    cast_in, cast_out = f"{start}_fp16", f"{BODY_OUTPUT}_fp16"
    converted: dict[str, str] = {}
    for node in graph.node:
        if node.output[0] not in body:
            continue
        for index, name in enumerate(node.input):
            if name == start:
                node.input[index] = cast_in
            elif name in weights and weights[name].data_type == TensorProto.FLOAT:
                node.input[index] = converted.setdefault(name, _halve(graph, weights[name], shared=name in outside))
        for index, name in enumerate(node.output):
            if name == BODY_OUTPUT:
                node.output[index] = cast_out
        _retype(node)
    nodes = list(graph.node)
    first = min(i for i, node in enumerate(nodes) if cast_in in node.input)
    last = max(i for i, node in enumerate(nodes) if cast_out in node.output)
    nodes.insert(last + 1, helper.make_node("Cast", [cast_out], [BODY_OUTPUT], to=TensorProto.FLOAT))
    nodes.insert(first, helper.make_node("Cast", [start], [cast_in], to=TensorProto.FLOAT16))
    del graph.node[:]
    graph.node.extend(nodes)
    return half


def _nodes_between(graph: onnx.GraphProto, start: str, end: str) -> set[str]:
    """The nodes that compute `end` from `start` and from weights, each by its first output's name."""
    producer = {name: node for node in graph.node for name in node.output}
    if end not in producer:
        raise ArtifactError(
            f"the graph does not name its body's output {end!r}; give an ONNX file that `opal-deploy export` wrote"
        )
    body: set[str] = set()
    pending = [end]
    while pending:
        name = pending.pop()
        node = producer.get(name)
        if node is None or name == start or node.output[0] in body:
            continue
        body.add(node.output[0])
        pending.extend(node.input)
    return body


def _halve(graph: onnx.GraphProto, tensor: onnx.TensorProto, *, shared: bool) -> str:
    """Turn a weight into float16; one that float32 nodes read too gets a float16 twin. Returns the name to read."""
    values = numpy_helper.to_array(tensor)
    finite = values[np.isfinite(values)]
    if finite.size and float(np.abs(finite).max()) > _HALF_MAX:
        raise ArtifactError(
            f"weight {tensor.name} reaches {float(np.abs(finite).max()):.3g}, beyond float16's {_HALF_MAX:g}; keep fp32"
        )
    name = f"{tensor.name}_fp16" if shared else tensor.name
    halved = numpy_helper.from_array(values.astype(np.float16), name)
    if shared:
        graph.initializer.append(halved)
    else:
        tensor.CopyFrom(halved)
    return name


def _retype(node: onnx.NodeProto) -> None:
    """Attributes that carry a float32 type or tensor."""
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16
        if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
            halved = numpy_helper.to_array(attribute.t).astype(np.float16)
            attribute.t.CopyFrom(numpy_helper.from_array(halved, attribute.t.name))
