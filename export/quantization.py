"""int8 by ONNX Runtime's static quantisation: explicit quantise/dequantise nodes, calibrated on photographs.

Symmetric per-channel weights and symmetric activations, which is what TensorRT takes. Convolutions and matrix products
of the backbone are quantised, except the first: it costs little, and all others inherit its rounding (on a ResNet-50
trained on birds it alone cost 4 % of the cells). The projection, normalisation layers, sums and the head stay float32.
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
from opal_deploy.export.graph_edit import body_input, nodes_between, projection_input
from opal_deploy.export.images import Pixels
from opal_deploy.preprocess.resize import normalise

_BATCH = 8
_QUANTISED_OPERATORS = ("Conv", "MatMul", "Gemm")


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
