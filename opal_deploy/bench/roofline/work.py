"""The work of a network: multiply-accumulates and bytes of every convolution and matrix product.

The real modules run on tensors without memory, so that nothing is assumed about an architecture. Each layer reads its
inputs and weights once and writes its outputs once; normalisation, activations and pooling between layers count as
fused. A device really moves more, so a ceiling from these bytes is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.model.config import HeadConfig

BYTES_PER_ELEMENT = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Layer:
    """One convolution or matrix product, for one image.

    Attributes:
        operation: `conv`, `linear`, or `matmul` of two activations.
    """

    name: str
    operation: str
    macs: int
    inputs: int
    outputs: int
    weights: int

    def bytes_moved(self, batch: int, precision: str) -> int:
        """Return the bytes of inputs, outputs and weights; UsageError for an unknown precision."""
        return (batch * (self.inputs + self.outputs) + self.weights) * _bytes_per_element(precision)

    def intensity(self, batch: int, precision: str) -> float:
        """Return the FLOPs per byte; a multiply-accumulate is two FLOPs."""
        return 2 * batch * self.macs / self.bytes_moved(batch, precision)


@dataclass(frozen=True)
class Work:
    """A network's layers in the order they run, at least one."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image."""
        return sum(layer.macs for layer in self.layers)

    @property
    def activations(self) -> int:
        """Elements of inputs and outputs of one image."""
        return sum(layer.inputs + layer.outputs for layer in self.layers)

    @property
    def weights(self) -> int:
        """Elements of weights and biases."""
        return sum(layer.weights for layer in self.layers)

    def flops(self, batch: int = 1) -> int:
        """Return the FLOPs of a batch, two per multiply-accumulate."""
        return 2 * batch * self.macs

    def bytes_moved(self, batch: int, precision: str) -> int:
        """Return the bytes of all layers in one precision; UsageError for an unknown one."""
        return sum(layer.bytes_moved(batch, precision) for layer in self.layers)

    def intensity(self, batch: int, precision: str) -> float:
        """Return the arithmetic intensity in FLOPs per byte."""
        return self.flops(batch) / self.bytes_moved(batch, precision)

    def __add__(self, other: Work) -> Work:
        return Work(f"{self.name} + {other.name}", self.layers + other.layers)


def count_model_work(metadata: Metadata) -> Work | None:
    """Count backbone and head of a model; None without torch, or if torchvision lacks the backbone."""
    from opal_deploy.model.config import HeadConfig

    try:
        for package in ("torch", "torchvision"):
            require(package, "train", "counting work")
        head = HeadConfig.from_dict({**metadata.head, "prototypes_per_class": metadata.prototypes_per_class})
        size, cut = metadata.input_size, (metadata.stride, metadata.keep_layers)
        backbone = count_backbone_work(metadata.backbone, size, *cut)
        return backbone + count_head_work(metadata.backbone, metadata.num_classes, head, size, *cut)
    except (UsageError, TypeError):
        return None


@cache
def count_backbone_work(
    name: str, input_size: tuple[int, int], stride: int | None = None, keep_layers: bool = False
) -> Work:
    """Count a backbone, cut before its pooling or at its last feature map of a stride.

    With `keep_layers` all layers are kept at this stride.

    Raises:
        UsageError: no such backbone or stride, or the stride does not divide the size.
    """
    from opal_deploy.model import backbones

    network = backbones.build(name, stride=stride, keep_layers=keep_layers, device="meta").eval()
    network.grid(input_size)
    return count_module_work(network, (3, *input_size), name)


@cache
def count_head_work(
    backbone: str,
    num_classes: int,
    head: HeadConfig,
    input_size: tuple[int, int],
    stride: int | None = None,
    keep_layers: bool = False,
) -> Work:
    """Count a head on a backbone's features; its softmax, pooling and distance count as fused.

    Raises:
        UsageError: no such backbone or stride, or the stride does not divide the size.
    """
    import torch

    from opal_deploy.model import backbones
    from opal_deploy.model.head import OpalHead

    network = backbones.build(backbone, stride=stride, keep_layers=keep_layers, device="meta")
    grid = network.grid(input_size)
    classifier = None
    if head.plain:
        classifier = backbones.build_classifier(
            backbone, num_classes, stride=stride, keep_layers=keep_layers, device="meta"
        )
    with torch.device("meta"):
        module = OpalHead(network.num_features, num_classes, head, classifier).eval()
    name = "ablated head" if head.kind == "opal" and not head.anchors else head.kind
    return count_module_work(module, (network.num_features, *grid), name)


def count_module_work(module: nn.Module, input_shape: tuple[int, ...], name: str) -> Work:
    """Run a module in evaluation mode on one input, and record every layer.

    Args:
        module: on any device; `meta` takes no memory.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    recorders = _build_recorders()
    layers: list[Layer] = []
    paths: list[str] = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if record := recorders.get(func):
                layers.append(record(paths[-1] if paths else name, args, result))
            return result

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: paths.append(path)

    handles = []
    for path, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(enter(path or name)))
        handles.append(child.register_forward_hook(lambda *_: paths.pop() and None))
    parameter = next(module.parameters(), torch.empty(0, device="meta"))
    try:
        with torch.no_grad(), Recorder():  # type: ignore[no-untyped-call]
            module(torch.empty(1, *input_shape, device=parameter.device))
    finally:
        for handle in handles:
            handle.remove()
    return Work(name, tuple(layers))


def _build_recorders() -> dict[Any, Callable[[str, Any, Any], Layer]]:
    """Return the recorders of the dispatcher's operations; linear layers arrive as (add)mm of a transposed weight."""
    import torch

    aten = torch.ops.aten
    return {
        aten.convolution.default: _convolution,
        aten.addmm.default: lambda path, args, result: _product(path, args[1], args[2], args[0], result),
        aten.mm.default: lambda path, args, result: _product(path, args[0], args[1], None, result),
        aten.bmm.default: lambda path, args, result: Layer(
            path, "matmul", result.numel() * args[0].shape[2], args[0].numel() + args[1].numel(), result.numel(), 0
        ),
    }


def _convolution(path: str, args: Any, result: Tensor) -> Layer:
    images, weight, bias, transposed = args[0], args[1], args[2], args[6]
    # a weight is [out, in / groups, ...], or transposed [in, out / groups, ...]
    per_element = weight.numel() // weight.shape[0]
    macs = (images if transposed else result).numel() * per_element
    weights = weight.numel() + (0 if bias is None else bias.numel())
    return Layer(path, "conv", macs, images.numel(), result.numel(), weights)


def _product(path: str, rows: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> Layer:
    weights = weight.numel() + (0 if bias is None else bias.numel())
    return Layer(path, "linear", rows.numel() * weight.shape[1], rows.numel(), result.numel(), weights)


def _bytes_per_element(precision: str) -> int:
    if precision not in BYTES_PER_ELEMENT:
        raise UsageError(f"precision {precision!r}: expected one of {', '.join(BYTES_PER_ELEMENT)}")
    return BYTES_PER_ELEMENT[precision]
