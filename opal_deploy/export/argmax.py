"""The nodes of a graph that find each channel's cell: ONNX's ArgMax, or comparisons with the maximum.

ArgMax is one node, which a runtime may compute by a slow kernel. `with_compared_cells` replaces it: of the cells whose
value equals the channel's maximum it takes the first. Of equal maxima both forms give the lowest cell. A channel whose
maximum is NaN gets cell 0. Where a runtime's maximum ignores NaN, the comparison never gives a cell with NaN; ONNX
Runtime's ArgMax does if that is cell 0.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportCandidate
from opal_deploy.export.graph_edit import producers

COMPARE = "compare"
_PREFIX = "cells_"


def with_compared_cells(candidate: ExportCandidate) -> ExportCandidate:
    """Return a candidate whose graph finds the cells by comparisons; the metadata's `exporter` says so.

    Raises:
        UsageError: the model has no evidence, so its only output is the logits.
    """
    metadata = candidate.metadata
    if metadata.evidence == "none":
        raise UsageError(
            "--argmax compare: the model has only logits and no cells to find (evidence none); leave it out"
        )
    model = compare_cells(candidate.model, math.prod(metadata.grid))
    return replace(
        candidate, model=model, metadata=replace(metadata, exporter={**metadata.exporter, "argmax": COMPARE})
    )


def find_attention(graph: onnx.GraphProto) -> str:
    """Return the name of the attention [N, K, H * W] that a graph's output `argmax` is found in, in either form."""
    made_by = producers(graph)
    node = made_by["argmax"]
    while node.op_type not in ("ArgMax", "Equal"):
        node = made_by[node.input[0]]
    return str(node.input[0])


def compare_cells(model: onnx.ModelProto, num_cells: int) -> onnx.ModelProto:
    """Return a copy of a model of ours, opset 18 or later, without ArgMax; unchanged if it has none.

    Nothing in the graph uses `argmax`, its output [N, K], yet; `num_cells` is H * W.
    """
    changed = copy.deepcopy(model)
    graph = changed.graph
    made_by = producers(graph)
    cast = made_by["argmax"]
    argmax = made_by[cast.input[0]]
    if argmax.op_type != "ArgMax":
        return changed
    attention = argmax.input[0]
    graph.node.remove(cast)
    graph.node.remove(argmax)

    def constant(name: str, value: np.ndarray[Any, Any]) -> str:
        graph.initializer.append(numpy_helper.from_array(value, _PREFIX + name))
        return _PREFIX + name

    def node(operator: str, name: str, *inputs: str, **attributes: Any) -> str:
        output = name if name == "argmax" else _PREFIX + name
        graph.node.append(helper.make_node(operator, inputs, [output], name=_PREFIX + name, **attributes))
        return output

    last_axis = constant("axis", np.array([2], np.int64))
    pooled = [each.output[0] for each in graph.node if each.op_type == "ReduceMax" and each.input[0] == attention]
    if pooled:
        maximum = node("Unsqueeze", "maximum", pooled[0], last_axis)  # [N, K, 1]
    else:
        maximum = node("ReduceMax", "maximum", attention, last_axis, keepdims=1)
    is_maximum = node("Equal", "is_maximum", attention, maximum)  # [N, K, H * W]
    # in float32, which every runtime reduces directly, and which counts exactly to 2^24
    cells = constant("numbers", np.arange(num_cells, dtype=np.float32)[None, None])
    none = constant("none", np.array([[[num_cells]]], np.float32))
    first = node("ReduceMin", "first", node("Where", "candidates", is_maximum, cells, none), last_axis, keepdims=0)
    # a NaN equals nothing: cell 0, as of ArgMax
    count = constant("count", np.array([[num_cells]], np.float32))
    node("Cast", "argmax", node("Mod", "in_range", first, count, fmod=1), to=TensorProto.INT32)
    return changed
