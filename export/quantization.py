"""int8 by explicit quantise/dequantise nodes, calibrated on photographs: ONNX Runtime's static quantisation.

Symmetric per-channel weights and symmetric activations, which is what TensorRT takes. Convolutions and matrix products
of the backbone are quantised, except the first: it costs little, and all others inherit its rounding (on a ResNet-50
trained on birds it alone cost 4 % of the cells). The projection, normalisation layers, sums and the head stay float32.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
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
from opal_deploy.errors import UsageError
from opal_deploy.export.graph_edit import BODY_OUTPUT, body_input, nodes_between, projection_input
from opal_deploy.export.images import Pixels, VerificationImages, image_files, read_images
from opal_deploy.preprocess.resize import normalise

CALIBRATION_PICTURES = 128
_LEAST = 16
_BATCH = 8
_QUANTISED = ("Conv", "MatMul", "Gemm")


def calibration_images(folder: Path | None, metadata: Metadata, *, share: float = 1.0) -> VerificationImages:
    """What int8's ranges are measured on: at most CALIBRATION_PICTURES of a folder, and at most that share of it.

    Raises:
        UsageError: no folder was given, or it has too few readable pictures.
    """
    if folder is None:
        raise UsageError(
            "--precision int8 needs --calibrate DIR, a folder of photographs such as the model will see: "
            "ranges measured on anything else cost accuracy and cells"
        )
    count = min(CALIBRATION_PICTURES, int(share * len(image_files(folder))))
    found = read_images(folder, metadata.input_size, count)
    if len(found.pixels) < _LEAST:
        kept = " (a third of the folder is kept to judge the result; --pictures gives others)" if share < 1.0 else ""
        raise UsageError(
            f"{folder}: {len(found.pixels)} readable pictures to calibrate with{kept}; at least {_LEAST} are needed"
        )
    return found


def to_int8(model: onnx.ModelProto, calibration: Pixels, metadata: Metadata) -> onnx.ModelProto:
    """A copy of a float32 graph whose backbone computes in int8.

    Args:
        model: of the contract's shape.
        calibration: uint8 [N, H0, W0, 3].
        metadata: of the model, for its kind of input.
    """
    graph = model.graph
    backbone = nodes_between(graph, body_input(graph), projection_input(graph))
    if projection_input(graph) == BODY_OUTPUT:
        backbone = nodes_between(graph, body_input(graph), BODY_OUTPUT)
    weighted = [n for n in graph.node if n.output[0] in backbone and n.op_type in _QUANTISED and _has_weight(n, graph)]
    chosen = [node.name for node in weighted[1:]]
    with tempfile.TemporaryDirectory(prefix="opal-int8-") as folder:
        source, target = Path(folder, "fp32.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, source)
        with _quiet():
            quantize_static(
                source,
                target,
                _Reader(calibration, metadata),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(_QUANTISED),
                nodes_to_quantize=chosen,
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


class _Reader(CalibrationDataReader):  # type: ignore[misc]
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


def _has_weight(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    return node.input[1] in weights


class _quiet:
    """Without the quantiser's advice on the root logger: it is for people who call it by hand."""

    def __enter__(self) -> None:
        self._before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *_: object) -> None:
        self._warnings.__exit__(None, None, None)
        logging.disable(self._before)
