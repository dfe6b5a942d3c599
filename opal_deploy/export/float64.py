"""An exported graph computed in float64, so that it can be compared with its network without any float32 rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch.nn import functional as nn

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.export.graph_edit import with_outputs

Array = NDArray[Any]


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
    values: list[Any] = [evaluator.run(names, {"images": image[None]}) for image in images]
    return Outputs.concatenate([Outputs.from_arrays(dict(zip(names, each, strict=True))) for each in values])


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
            padded, _tensor(weight), None if bias is None else _tensor(bias),
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
        return (nn.max_pool2d(padded, kernel, strides, ceil_mode=bool(attributes.get("ceil_mode"))).numpy(),)


class AveragePool(OpRun):
    """Average pooling over two spatial axes, with equal padding on both sides."""

    op_domain = ""

    def _run(self, x: Array, **attributes: Any) -> tuple[Array]:
        pads = tuple(attributes.get("pads") or (0, 0, 0, 0))
        y = nn.avg_pool2d(
            _tensor(x), tuple(attributes["kernel_shape"]), tuple(attributes.get("strides") or (1, 1)), pads[:2],
            ceil_mode=bool(attributes.get("ceil_mode")), count_include_pad=bool(attributes.get("count_include_pad")),
        )  # fmt: skip
        return (y.numpy(),)


class Erf(OpRun):
    """Gauss error function."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (torch.erf(_tensor(x)).numpy(),)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _pad(x: Array, pads: list[int] | None, value: float) -> torch.Tensor:
    """Return `x` padded on its two spatial axes; `pads` are ONNX's top, left, bottom, right."""
    top, left, bottom, right = pads or (0, 0, 0, 0)
    return nn.pad(_tensor(x), (left, right, top, bottom), value=value)
