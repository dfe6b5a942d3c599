"""Checkpoints as sources of an export, and the tracing of networks: the only part of the exporter that needs torch.

A traced graph has the contract's shape (docs/contract.md). Input `images`: uint8 [N, H0, W0, 3]. Outputs: logits
float32 [N, C], argmax int32 [N, K], scores float32 [N, K] and, where the checkpoint has neighbours, OOD score float32
[N]; on request, attention float32 [N, K, H, W].

Where the plain gate fails, the graph is compared with the network in float64, without any float32 rounding.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor, nn
from torch.nn import functional

from opal_deploy.artifact.metadata import InputKind, Metadata, Precision
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportCandidate, Float64Comparison, SampledReference
from opal_deploy.export.graph_edit import BODY_INPUT, BODY_OUTPUT, strip_traces, with_outputs
from opal_deploy.export.images import Pixels, choose_images, run_in_batches
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.portable import IR_VERSION, OPSET, make_portable
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.model.graph import InferenceGraph
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.gates import Rounding
from opal_deploy.runtime.torch_session import TorchSession, to_tensor
from opal_deploy.synthetic import test_vector_images

Array = NDArray[Any]
# ONNX files are protobuf messages; one file without external data cannot be larger
MAX_BYTES = (1 << 31) - 1
_PREFIX = "traced_"


@dataclass(frozen=True)
class CheckpointSource:
    """A loaded checkpoint with its path; the reference is PyTorch in float32 on the CPU."""

    checkpoint: Checkpoint
    path: Path

    @property
    def onnx_precision(self) -> None:
        """None: the source is not an ONNX file."""
        return None

    @cached_property
    def origin(self) -> Metadata:
        """The checkpoint's metadata, with the version of PyTorch that exports it."""
        return replace(build_metadata(self.checkpoint), exporter={"torch": torch.__version__})

    def build_candidate(self, precisions: Collection[Precision], options: ExportOptions) -> ExportCandidate:
        """Trace the network and return its float32 graph with PyTorch's outputs as reference.

        Args:
            precisions: precisions that the graph will be converted to; int8 needs images to calibrate with.
            options: how the files are made and verified.

        Raises:
            UsageError: the network is over ONNX's 2 GB, or too few images to verify on or to calibrate with.
        """
        description = self.origin
        options.log(f"Tracing {description.backbone}, {description.num_classes} classes")
        # resizing is added to the traced graph
        kind: InputKind = "float32" if options.input == "float32" else "uint8"
        graph = ExportGraph(
            self.checkpoint.network, kind, description.mean, description.std, attention=options.attention
        )
        model = trace(graph)
        metadata = replace(description, input_kind=kind, outputs=graph.output_names)
        session = TorchSession(self.checkpoint, device="cpu")
        choice = choose_images(metadata, options, calibrate="int8" in precisions, model=self.path)
        sample = SampledReference(choice.verification, session.run_reference)

        def compare_in_float64(candidate: onnx.ModelProto, images: Pixels) -> Float64Comparison:
            options.log(f"Comparing the graph with the network in float64 on {len(images)} images")
            exact = session.run_float64(images)
            in_float32 = [run_in_batches(run, images, Outputs.concatenate) for run in session.float32_runs]
            graph_input = images if kind == "uint8" else normalise(images, metadata.mean, metadata.std)
            return Float64Comparison(
                Rounding.between(exact, [run_in_float64(candidate, graph_input)], metadata),
                Rounding.between(exact, in_float32, metadata),
            )

        return ExportCandidate(
            model,
            metadata,
            sample,
            reference_name=session.description,
            test_vectors=session.run_reference(test_vector_images(*metadata.input_size)),
            calibration=choice.calibration,
            compare_in_float64=compare_in_float64,
        )


class ExportGraph(InferenceGraph):
    """A network wrapped for tracing.

    `forward` returns the outputs in the order of `output_names`, then the tensors of `marker_names`, which name the
    body's two ends.
    """

    @property
    def marker_names(self) -> tuple[str, ...]:
        """The two ends of the body; an already normalised input is the graph's own `images`."""
        return (BODY_INPUT, BODY_OUTPUT) if self.input_kind == "uint8" else (BODY_OUTPUT,)

    def example(self) -> Tensor:
        """Return a batch of two to trace with; the tracer would take a batch of one for a constant."""
        height, width = self.network.config.input_size
        if self.input_kind == "uint8":
            return torch.zeros(2, height, width, 3, dtype=torch.uint8)
        return torch.zeros(2, 3, height, width)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        normalised = self.normalise(images)
        values = {**self.explain(normalised), BODY_INPUT: normalised}
        return tuple(values[name] for name in (*self.output_names, *self.marker_names))


def trace(graph: ExportGraph) -> onnx.ModelProto:
    """Return the ONNX model of an export graph: input `images` with dynamic N, outputs of the contract's names.

    Raises:
        UsageError: the file would be over ONNX's 2 GB.
    """
    parameters = sum(t.numel() * t.element_size() for t in (*graph.parameters(), *graph.buffers()))
    if parameters > MAX_BYTES:
        raise UsageError(f"{parameters / 1e9:.1f} GB of parameters, more than ONNX's 2 GB; use a smaller backbone")
    graph.eval()
    names = [*graph.output_names, *graph.marker_names]
    with warnings.catch_warnings(), torch.no_grad(), _pooling_by_mean(graph):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            graph,
            (graph.example(),),
            dynamo=True,
            input_names=["images"],
            # traced under other names: the tracer's own `argmax` would clash with the output of that name
            output_names=[_PREFIX + name for name in names],
            dynamic_shapes=({0: torch.export.Dim("N")},),
            opset_version=OPSET,
            optimize=True,
            verbose=False,
        )
    assert program is not None  # with the tracer `dynamo`
    model = program.model_proto
    make_portable(model.graph)
    return _clean(model, graph)


class _SpatialMean(nn.Module):
    """The mean over rows and columns, [N, D, 1, 1]: what PyTorch computes for average pooling to one cell."""

    def forward(self, features: Tensor) -> Tensor:
        return features.mean((2, 3), keepdim=True)


@contextlib.contextmanager
def _pooling_by_mean(graph: nn.Module) -> Iterator[None]:
    """Replace average pooling to one cell, as of squeeze and excitation, by a mean.

    The tracer would write the pooling's strides as Shape, Squeeze, Range and Gather nodes, some of which ONNX Runtime
    computes on the CPU.
    """
    pools = [
        (parent, name, child)
        for parent in graph.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.AdaptiveAvgPool2d) and child.output_size in (1, (1, 1))
    ]
    for parent, name, _ in pools:
        setattr(parent, name, _SpatialMean())
    try:
        yield
    finally:
        for parent, name, pool in pools:
            setattr(parent, name, pool)


def _clean(model: onnx.ModelProto, graph: ExportGraph) -> onnx.ModelProto:
    """Give outputs the contract's names, take markers from the outputs, and remove traces of the exporting machine."""
    final = {_PREFIX + name: name for name in (*graph.output_names, *graph.marker_names)}
    taken = set(final.values())
    strip_traces(model)
    del model.metadata_props[:]
    for node in model.graph.node:
        _rename(node.input, final, taken)
        _rename(node.output, final, taken)
    for value in model.graph.output:
        value.name = final.get(value.name, value.name)
    outputs = {value.name: value for value in model.graph.output}
    keep = [outputs[name] for name in graph.output_names]
    del model.graph.output[:]
    model.graph.output.extend(keep)
    del model.graph.value_info[:]
    model.graph.name = "opal"
    model.ir_version = IR_VERSION
    return model


def _rename(names: Any, final: dict[str, str], taken: set[str]) -> None:
    for index, name in enumerate(names):
        if name in final:
            names[index] = final[name]
        elif name in taken:
            names[index] = f"{name}_inner"


def run_in_float64(model: onnx.ModelProto, images: Array) -> Outputs:
    """Return logits and, where the graph has them, scores and argmax, computed in float64.

    Args:
        model: a float32 graph of the contract's shape; its weights are used as they are.
        images: the graph's input: uint8 [N, H0, W0, 3], or float32 [N, 3, H0, W0].
    """
    computed = {name for node in model.graph.node for name in node.output}
    names = [name for name in ("logits", "argmax", "scores") if name in computed]
    evaluator = ReferenceEvaluator(_to_float64(with_outputs(model, names)), new_ops=[Conv, MaxPool, AveragePool, Erf])
    if images.dtype == np.float32:
        images = images.astype(np.float64)
    # one by one: the evaluator keeps every intermediate value until the end, 200 MB per image of a ResNet-50
    results: list[Any] = [evaluator.run(names, {"images": image[None]}) for image in images]
    return Outputs.concatenate([Outputs.from_arrays(dict(zip(names, values, strict=True))) for values in results])


def _to_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """Widen all float32 constants, casts and inputs of a model in place; return it."""
    graph = model.graph
    for tensor in graph.initializer:
        _widen(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
            if attribute.HasField("t"):
                _widen(attribute.t)
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return model


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


# ONNX's own evaluator computes these in Python loops, minutes per image; PyTorch's float64 kernels are exact enough


class Conv(OpRun):
    """Convolution."""

    op_domain = ""

    def _run(self, x: Array, weight: Array, bias: Array | None = None, **attributes: Any) -> tuple[Array]:
        padded = _pad(x, attributes.get("pads"), 0.0)
        rank = x.ndim - 2
        y = torch.convolution(
            padded, to_tensor(weight), None if bias is None else to_tensor(bias),
            list(attributes.get("strides") or [1] * rank), [0] * rank, list(attributes.get("dilations") or [1] * rank),
            False, [0] * rank, attributes.get("group") or 1,
        )  # fmt: skip
        return (y.numpy(),)


class MaxPool(OpRun):
    """Max pooling over two spatial axes."""

    op_domain = ""

    def _run(self, x: Array, **attributes: Any) -> tuple[Array]:
        kernel, strides = tuple(attributes["kernel_shape"]), tuple(attributes.get("strides") or (1, 1))
        padded = _pad(x, attributes.get("pads"), -np.inf)
        return (functional.max_pool2d(padded, kernel, strides, ceil_mode=bool(attributes.get("ceil_mode"))).numpy(),)


class AveragePool(OpRun):
    """Average pooling over two spatial axes, with equal padding on both sides."""

    op_domain = ""

    def _run(self, x: Array, **attributes: Any) -> tuple[Array]:
        pads = tuple(attributes.get("pads") or (0, 0, 0, 0))
        y = functional.avg_pool2d(
            to_tensor(x), tuple(attributes["kernel_shape"]), tuple(attributes.get("strides") or (1, 1)), pads[:2],
            ceil_mode=bool(attributes.get("ceil_mode")), count_include_pad=bool(attributes.get("count_include_pad")),
        )  # fmt: skip
        return (y.numpy(),)


class Erf(OpRun):
    """Gauss error function."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (torch.erf(to_tensor(x)).numpy(),)


def _pad(x: Array, pads: list[int] | None, value: float) -> torch.Tensor:
    """Return `x` padded on its two spatial axes; `pads` are ONNX's top, left, bottom, right."""
    top, left, bottom, right = pads or (0, 0, 0, 0)
    return functional.pad(to_tensor(x), (left, right, top, bottom), value=value)
