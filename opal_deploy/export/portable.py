"""Forms of operators that runtimes other than ONNX Runtime compute right, too."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper


def make_portable(graph: onnx.GraphProto) -> None:
    """Rewrite the norm and the average pooling of a traced graph in place; the graph has the shapes of its values.

    The embedding's norm changes by rounding only, everything else not at all.
    """
    described = (*graph.input, *graph.value_info, *graph.output)
    shapes = {value.name: [size.dim_value for size in value.type.tensor_type.shape.dim] for value in described}
    nodes = []
    for node in graph.node:
        if node.op_type == "ReduceL2" and len(shapes.get(node.input[0], ())) == 2:
            nodes += _norm_as_product(graph, node, shapes[node.input[0]][1])
            continue
        if node.op_type == "AveragePool":
            _round_down(node, shapes.get(node.input[0], []))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    constants = [each for each in graph.initializer if each.name in used]
    del graph.initializer[:]
    graph.initializer.extend(constants)


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


def _round_down(node: onnx.NodeProto, shape: list[int]) -> None:
    """Clear `ceil_mode`, with which IREE 3.13 pools wrongly, where the stride divides what the kernel leaves."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if not attributes.get("ceil_mode") or len(shape) != 4 or "auto_pad" in attributes or "dilations" in attributes:
        return
    kernel, pads, strides = (
        list(attributes[name].ints) if name in attributes else default
        for name, default in (("kernel_shape", []), ("pads", [0] * 4), ("strides", [1, 1]))
    )
    left = [size + pads[axis] + pads[axis + 2] - kernel[axis] for axis, size in enumerate(shape[2:])]
    if all(size % stride == 0 for size, stride in zip(left, strides, strict=True)):
        attributes["ceil_mode"].i = 0
