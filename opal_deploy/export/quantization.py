"""int8 by ONNX Runtime's static quantisation: explicit quantise/dequantise nodes, calibrated on photographs.

Symmetric per-channel weights and symmetric activations, which is what TensorRT takes. Convolutions and matrix products
of the backbone are quantised, except the first: it costs little, and all others inherit its rounding (on a ResNet-50
trained on birds it alone cost 4 % of the cells). The projection, normalisation layers, sums and the head stay float32.

ONNX Runtime hands the rounded value to every reader of a quantised tensor, so the sums of residual branches add rounded
values too, block after block. Where a network does not stand that, or int8 in its first layers, whose rounding passes
through all others, `refinements` take it back.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.export.graph_edit import body_input, nodes_between, nodes_of, producers, projection_input
from opal_deploy.export.images import Pixels
from opal_deploy.preprocess.resize import normalise

_BATCH = 8
_QUANTISED_OPERATORS = ("Conv", "MatMul", "Gemm")
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
# shares of the quantised layers, from the first on, that are taken back to float32 in turn until the gate passes
_FLOAT_SHARES = (0.0, 0.125, 0.25, 0.5)


def to_int8(model: onnx.ModelProto, calibration: Pixels, metadata: Metadata) -> onnx.ModelProto:
    """Return a copy of a float32 graph whose backbone computes in int8.

    Args:
        model: graph of the contract's shape (docs/contract.md).
        calibration: images to measure ranges on, uint8 [N, H0, W0, 3].
        metadata: metadata of the model, for its kind of input.
    """
    graph = model.graph
    backbone = nodes_between(graph, body_input(graph), projection_input(graph))
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    weighted = [
        node.name
        for node in graph.node
        if node.output[0] in backbone and node.op_type in _QUANTISED_OPERATORS and node.input[1] in weights
    ]
    with tempfile.TemporaryDirectory(prefix="opal-int8-") as folder:
        source, target = Path(folder, "fp32.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, source)
        with _quiet():
            quantize_static(
                source,
                target,
                _CalibrationReader(calibration, metadata),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(_QUANTISED_OPERATORS),
                nodes_to_quantize=weighted[1:],
                per_channel=True,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
                extra_options={
                    "ActivationSymmetric": True,
                    "WeightSymmetric": True,
                    "QuantizeBias": False,
                    "AddQDQPairToWeight": True,
                    # the mean of the batches' ranges: the range of all is set by single pixels, and steps grow with it
                    "CalibMovingAverage": True,
                },
            )
        quantised = onnx.load(target)
    quantised.ir_version = model.ir_version
    del quantised.graph.value_info[:]
    quantised.graph.name = graph.name
    del quantised.graph.input[:], quantised.graph.output[:]
    quantised.graph.input.extend(graph.input)
    quantised.graph.output.extend(graph.output)
    return quantised


def refinements(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield coarser to finer variants of a quantised graph, each with what is quantised in it.

    First the graph itself, whose residual branches are summed from int8, which engines can fuse; then with sums of
    unrounded values; then with more and more of its first layers in float32 too, up to half of them.
    """
    layers = quantised_layers(model)
    yield f"{len(layers)} of {len(layers)} layers", model
    for count in sorted({round(share * len(layers)) for share in _FLOAT_SHARES}):
        description = f"{len(layers) - count} of {len(layers)} layers, sums in float32"
        yield description, _quantise_only(model, set(layers[count:]))


def quantised_layers(model: onnx.ModelProto) -> list[str]:
    """Return the names of the nodes that compute in int8, in the graph's order."""
    made_by = producers(model.graph)
    return [
        node.name
        for node in model.graph.node
        if node.op_type in _QUANTISED_OPERATORS and all(_is_dequantised(made_by, name) for name in node.input[:2])
    ]


def _quantise_only(model: onnx.ModelProto, names: set[str]) -> onnx.ModelProto:
    """Return a copy of a quantised graph in which only the nodes of these names take quantised values."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    made_by = producers(graph)
    for node in graph.node:
        if node.name not in names and node.op_type not in _CONVERSIONS:
            for i, name in enumerate(node.input):
                if _is_dequantised(made_by, name):
                    node.input[i] = made_by[made_by[name].input[0]].input[0]
    needed = nodes_of(graph, [output.name for output in graph.output])
    for node in [node for node in graph.node if node.output[0] not in needed]:
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for weight in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(weight)
    return changed


def _is_dequantised(made_by: dict[str, onnx.NodeProto], name: str) -> bool:
    return name in made_by and made_by[name].op_type == "DequantizeLinear"


class _CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
    """The calibration images as feeds of the graph, in batches."""

    def __init__(self, pixels: Pixels, metadata: Metadata) -> None:
        self._batches = self._feed(pixels, metadata)

    @staticmethod
    def _feed(pixels: Pixels, metadata: Metadata) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        for start in range(0, len(pixels), _BATCH):
            batch = pixels[start : start + _BATCH]
            as_float = metadata.input_kind == "float32"
            yield {"images": normalise(batch, metadata.mean, metadata.std) if as_float else batch}

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        return next(self._batches, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the quantiser's advice on the root logger, which is for people who call it by hand."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
