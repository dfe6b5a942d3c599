"""int8 on the ONNX graph itself (docs/precision.md).

ONNX Runtime's static quantisation, calibrated on photographs: quantise and dequantise nodes with symmetric weights per
channel. Convolutions and matrix products of the backbone are quantised, except the first: it is cheap, and all others
inherit its rounding (4 % of the cells on a ResNet-50 trained on birds). Activations are of the type that runs fast:

- uint8 for processors. After a ReLU all 256 steps are used, and runtimes fuse convolution, ReLU and rounding.
- int8, symmetric, for TensorRT, which takes no other zero point than 0. ONNX Runtime has no fast kernels for it.

Biases are corrected by the shift of each channel's mean that rounded weights cause (Nagel et al., ICCV 2019, section
4.2). Residual sums add rounded values too. Where a network does not tolerate that, `refinements` undo it, and int8 in
the layers whose rounding changes most.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnxruntime import InferenceSession, SessionOptions
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

from opal_deploy.artifact.metadata import Activations, Metadata
from opal_deploy.artifact.outputs import INPUT
from opal_deploy.export.graph_edit import BODY_OUTPUT, body_nodes, nodes_of, producers, projection_input, with_outputs
from opal_deploy.export.images import Pixels
from opal_deploy.export.portable import drop_unused_constants
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.runtime.onnx_session import prepare_input

_BATCH = 8
_WEIGHTED = ("Conv", "MatMul", "Gemm")
# activations whose rounded outputs a convolution's kernel computes
_FUSED = ("Relu", "Clip")
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
# variants to try in turn until one passes the gate: the share of layers in float32, and whether sums are
_VARIANTS = ((0.0, False), (0.125, False), (0.125, True), (0.25, True), (0.5, True))
# calibration images on which each layer is tried alone
_TRIED_IMAGES = 32


def to_int8(
    model: onnx.ModelProto,
    calibration: Pixels,
    metadata: Metadata,
    *,
    activations: Activations = "uint8",
    threads: int | None = None,
) -> onnx.ModelProto:
    """Return a copy of a float32 graph with an int8 backbone, calibrated on uint8 [N, H0, W0, 3] images.

    Args:
        activations: int8 for TensorRT.
        threads: of ONNX Runtime; None: as many as this process may use.
    """
    graph = model.graph
    backbone = body_nodes(graph, projection_input(graph))
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    nodes = [node for node in graph.node if node.output[0] in backbone]
    chosen = [node for node in nodes if node.op_type in _WEIGHTED and node.input[1] in weights][1:]
    kinds: tuple[str, ...] = _WEIGHTED
    if activations == "uint8":
        made, kinds = {node.output[0] for node in chosen}, (*_WEIGHTED, *_FUSED)
        chosen += [node for node in nodes if node.op_type in _FUSED and node.input[0] in made]
    with tempfile.TemporaryDirectory(prefix="opal-int8-") as folder:
        source, target = Path(folder, "fp32.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, source)
        with _quiet():
            quantize_static(
                source,
                target,
                _CalibrationReader(calibration, metadata),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(kinds),
                nodes_to_quantize=[node.name for node in chosen],
                per_channel=True,
                activation_type=QuantType.QUInt8 if activations == "uint8" else QuantType.QInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
                extra_options={
                    "ActivationSymmetric": activations == "int8",
                    "WeightSymmetric": True,
                    # ONNX Runtime rounds them when it fuses; TensorRT takes float32
                    "QuantizeBias": False,
                    "AddQDQPairToWeight": True,
                    # clipping at 0 would do instead of a ReLU, but only as long as its output stays quantised
                    "QDQKeepRemovableActivations": True,
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
    _correct_biases(quantised, model, _Runner(calibration, metadata, threads))
    return quantised


class _Runner:
    """Runs graphs on images with exact int8 arithmetic, unfused."""

    def __init__(self, pixels: Pixels, metadata: Metadata, threads: int | None) -> None:
        self._pixels = pixels
        self._metadata = metadata
        self._options = SessionOptions()
        self._options.intra_op_num_threads = threads or available_cpus()
        self._options.add_session_config_entry("session.disable_quant_qdq", "1")

    def run(self, model: onnx.ModelProto, names: Sequence[str]) -> Iterator[list[NDArray[Any]]]:
        """Yield these values of the graph for each batch."""
        session = InferenceSession(
            with_outputs(model, names).SerializeToString(), self._options, providers=["CPUExecutionProvider"]
        )
        for images in _batches(self._pixels, self._metadata):
            yield session.run(list(names), {INPUT: images})

    def means(self, model: onnx.ModelProto, names: Sequence[str]) -> list[NDArray[np.float64]]:
        """Return the mean of each channel of these values, [N, C, ...], over all images and cells."""
        totals = [np.zeros(1)] * len(names)
        for values in self.run(model, names):
            sums = (value.reshape(*value.shape[:2], -1).mean(axis=2, dtype=np.float64).sum(axis=0) for value in values)
            totals = [total + added for total, added in zip(totals, sums, strict=True)]
        return [total / len(self._pixels) for total in totals]

    def values(self, model: onnx.ModelProto, name: str) -> NDArray[np.float32]:
        """Return this value of the graph for all images."""
        return np.concatenate([value for (value,) in self.run(model, [name])])


def _correct_biases(quantised: onnx.ModelProto, model: onnx.ModelProto, runner: _Runner) -> None:
    """Correct each convolution's bias by the shift that its rounded weights cause at the channels' means."""
    weights = {tensor.name: tensor for tensor in quantised.graph.initializer}
    made_by, names = producers(quantised.graph), set(quantised_layers(quantised))
    layers = [
        node
        for node in quantised.graph.node
        if node.name in names and node.op_type == "Conv" and len(node.input) > 2 and node.input[2] in weights
    ]
    if not layers:
        return
    inputs = {node.name: node.input[0] for node in model.graph.node}
    for node, mean in zip(layers, runner.means(model, [inputs[node.name] for node in layers]), strict=True):
        dequantise = made_by[node.input[1]]
        weight = numpy_helper.to_array(weights[made_by[dequantise.input[0]].input[0]])
        scale = numpy_helper.to_array(weights[dequantise.input[1]]).reshape(-1, *[1] * (weight.ndim - 1))
        error = (_round(weight, scale) * scale.astype(np.float64) - weight).sum(axis=tuple(range(2, weight.ndim)))
        groups = len(mean) // error.shape[1]
        added = np.einsum("goi,gi->go", error.reshape(groups, -1, error.shape[1]), mean.reshape(groups, -1)).ravel()
        bias = weights[node.input[2]]
        bias.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(bias) - added).astype(np.float32), bias.name))


def _round(weight: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return the weight in steps of `scale`, as QuantizeLinear rounds it."""
    rounded: NDArray[np.int8] = np.clip(np.rint(weight / scale), -128, 127).astype(np.int8)
    return rounded


def store_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a quantised graph whose int8 weights are stored as such, a quarter of the size."""
    stored = copy.deepcopy(model)
    graph = stored.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] in weights]:
        weight, scale = (numpy_helper.to_array(weights[name]) for name in node.input[:2])
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        shape = [1] * weight.ndim
        shape[axis] = scale.size
        graph.initializer.append(numpy_helper.from_array(_round(weight, scale.reshape(shape)), node.output[0]))
        graph.node.remove(node)
    drop_unused_constants(graph)
    return stored


def refinements(
    model: onnx.ModelProto,
    baseline: onnx.ModelProto,
    calibration: Pixels,
    metadata: Metadata,
    threads: int | None = None,
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield coarser to finer variants of a quantised graph, each with a description of its quantised part.

    The first is the graph itself, whose residual branches are summed from int8, which runtimes can fuse. Then layers
    stay in float32, those whose rounding changes most first. Last, sums take unrounded values too.

    Args:
        baseline: the float32 graph that `model` was made from.
        calibration: uint8 [N, H0, W0, 3], on which the layers are tried.
    """
    layers = quantised_layers(model)
    ranked: list[str] = []
    for share, exact_sums in _VARIANTS:
        count = round(share * len(layers))
        if count and not ranked:
            runner = _Runner(calibration[:: -(-len(calibration) // _TRIED_IMAGES)], metadata, threads)
            ranked = _rank(model, layers, runner, baseline)
        text = f"{len(layers) - count} of {len(layers)} layers{', sums in float32' if exact_sums else ''}"
        variant = model
        if share:
            variant = _quantise_only(model, set(layers).difference(ranked[:count]), baseline, exact_sums=exact_sums)
        yield text, variant


def _rank(model: onnx.ModelProto, layers: Iterable[str], runner: _Runner, baseline: onnx.ModelProto) -> list[str]:
    """Return the layers by how much quantising each alone changes the projected features, largest first."""
    reference = runner.values(baseline, BODY_OUTPUT)
    changes = {
        layer: float(np.square(runner.values(_quantise_only(model, {layer}, baseline), BODY_OUTPUT) - reference).mean())
        for layer in layers
    }
    return sorted(changes, key=lambda layer: changes[layer], reverse=True)


def quantised_layers(model: onnx.ModelProto) -> list[str]:
    """Return the names of the nodes that compute in int8, in the graph's order."""
    made_by = producers(model.graph)
    return [
        node.name
        for node in model.graph.node
        if node.op_type in _WEIGHTED and all(_is_dequantised(made_by, name) for name in node.input[:2])
    ]


def _quantise_only(
    model: onnx.ModelProto, names: set[str], baseline: onnx.ModelProto, *, exact_sums: bool = True
) -> onnx.ModelProto:
    """Return a copy of a quantised graph in which only the layers of these names take quantised values.

    Layers that are taken back to float32 get their biases of `baseline` back.

    Args:
        exact_sums: whether nodes that are no layers, such as residual sums, take unrounded values.
    """
    changed = copy.deepcopy(model)
    graph = changed.graph
    made_by, layers = producers(graph), set(quantised_layers(model))
    biases = set()
    for node in graph.node:
        if node.name in names or node.op_type in _CONVERSIONS or not (exact_sums or node.name in layers):
            continue
        if node.op_type == "Conv":
            biases.update(node.input[2:])
        for i, name in enumerate(node.input):
            if _is_dequantised(made_by, name):
                node.input[i] = made_by[made_by[name].input[0]].input[0]
    needed = nodes_of(graph, [output.name for output in graph.output])
    for node in [node for node in graph.node if node.output[0] not in needed]:
        graph.node.remove(node)
    drop_unused_constants(graph)
    plain = {tensor.name: tensor for tensor in baseline.graph.initializer if tensor.name in biases}
    for tensor in graph.initializer:
        if tensor.name in plain:
            tensor.CopyFrom(plain[tensor.name])
    return changed


def _is_dequantised(made_by: dict[str, onnx.NodeProto], name: str) -> bool:
    return name in made_by and made_by[name].op_type == "DequantizeLinear"


class _CalibrationReader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
    """The calibration images as inputs of the graph, in batches."""

    def __init__(self, pixels: Pixels, metadata: Metadata) -> None:
        self._inputs = ({INPUT: batch} for batch in _batches(pixels, metadata))

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._inputs, None)


def _batches(pixels: Pixels, metadata: Metadata) -> Iterator[NDArray[Any]]:
    return (prepare_input(pixels[start : start + _BATCH], metadata) for start in range(0, len(pixels), _BATCH))


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
