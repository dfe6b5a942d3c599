"""Which layer a lower precision hurts most: the one line that tells where to look when a gate fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.export.graph_edit import BODY_OUTPUT, body_input, nodes_between, with_outputs
from opal_deploy.preprocess.resize import normalise

# layers with weights, and what adds up their errors
_LAYERS = ("Conv", "MatMul", "Gemm", "LayerNormalization", "Add")
# of one layer's values: a relative error of values that are all nearly zero says nothing
_FLOOR = 1e-6


def worst_layer(
    baseline: onnx.ModelProto, candidate: onnx.ModelProto, picture: NDArray[np.uint8], metadata: Metadata
) -> str:
    """A clause that names the layer of largest relative error (RMS) on one picture, or the first that overflows.

    Args:
        baseline: the float32 graph.
        candidate: made from it, with the same names for the same values, float32 between its layers.
        picture: uint8 [H0, W0, 3].
        metadata: of the model, for its kind of input.
    """
    body = nodes_between(baseline.graph, body_input(baseline.graph), BODY_OUTPUT)
    kept = {name for node in candidate.graph.node for name in node.output}
    layers = {
        node.output[0]: node
        for node in baseline.graph.node
        if node.output[0] in body and node.op_type in _LAYERS and node.output[0] in kept
    }
    names = list(layers)
    batch = picture[None]
    feed: Any = normalise(batch, metadata.mean, metadata.std) if metadata.input_kind == "float32" else batch
    expected, found = (_values(model, names, feed) for model in (baseline, candidate))
    worst, largest = "", -1.0
    for name, before, after in zip(names, expected, found, strict=True):
        title = f"{layers[name].op_type} {_title(layers[name])}"
        if not np.isfinite(after).all():
            return f"where {title} is the first layer to overflow (its values reach {np.abs(before).max():.3g})"
        scale = float(np.sqrt(np.mean(np.square(before, dtype=np.float64))))
        error = float(np.sqrt(np.mean(np.square(before - after, dtype=np.float64)))) / max(scale, _FLOOR)
        if error > largest:
            worst, largest = title, error
    return f"where {worst} is furthest off ({100 * largest:.2g} %)"


def _values(model: onnx.ModelProto, names: list[str], feed: Any) -> list[NDArray[np.float32]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        with_outputs(model, names).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(names, {"images": feed}))


def _title(node: onnx.NodeProto) -> str:
    """The weight's name, which people know from their network, or the value's."""
    weights = [str(name) for name in node.input[1:] if name.endswith(".weight")]
    return weights[0].removeprefix("network.") if weights else str(node.output[0])
