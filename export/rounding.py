"""What a lower precision does to a graph's answers, computed where its arithmetic cannot run.

ONNX Runtime has no bfloat16 convolutions on CPUs, and its float16 there is float32 arithmetic between two casts:
300 * 300 does not overflow, so a model that passes there may still fail on a GPU. The twin made here keeps every value
in float32 and rounds it to the narrow type after every operation, as a GPU stores it between kernels; sums inside one
operation are float32's, as in a tensor core's accumulator. A GPU that fuses operations rounds less often.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.export.graph_edit import producers

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# they move values without changing them
_EXACT = {
    "Cast", "Concat", "Flatten", "Gather", "Identity", "MaxPool", "Range", "Relu", "Reshape", "Shape", "Slice", "Split",
    "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip


def rounded_twin(model: onnx.ModelProto) -> onnx.ModelProto:
    """A float32 graph with the answers that a graph with a float16 or bfloat16 body gives; any ONNX Runtime runs it.

    Values keep their names.
    """
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    graph = twin.graph
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
        for index, name in enumerate(node.output):
            if name in rounded:
                node.output[index] = f"{name}_unrounded"
        nodes.append(node)
        for name in rounded:
            nodes += [
                helper.make_node("Cast", [f"{name}_unrounded"], [f"{name}_narrow"], to=narrow[name]),
                helper.make_node("Cast", [f"{name}_narrow"], [name], to=TensorProto.FLOAT),
            ]
    del graph.node[:]
    graph.node.extend(nodes)
    return twin


def _narrow_values(model: onnx.ModelProto) -> dict[str, int]:
    """Values of a narrow type, with it."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    unknown = [name for name in producers(model.graph) if name and name not in types]
    if unknown:
        raise RuntimeError(f"ONNX infers no type for {unknown[:3]}")
    return {name: kind for name, kind in types.items() if kind in _NARROW}
