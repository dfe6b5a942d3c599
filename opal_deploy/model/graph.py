"""The network as it is deployed: images to the contract's outputs (docs/contract.md), with the backbone's precision.

Normalisation is part of the graph, so that images reach the device as uint8.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opal_deploy.artifact.metadata import InputKind
from opal_deploy.model.network import OpalNetwork

PROJECTED = "projected"
# types of the backbone; `tf32` is float32 whose products a GPU rounds, by a PyTorch setting
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class InferenceGraph(nn.Module):
    """A network with its normalisation.

    Input `images`: uint8 [N, H0, W0, 3] RGB, or float32 [N, 3, H0, W0] already normalised. `forward` returns the
    outputs in the order of `output_names`.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        network: OpalNetwork,
        input_kind: InputKind,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        attention: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.input_kind = input_kind
        self.with_attention = attention
        # (v / 255 - mean) / std as one multiplication and one subtraction
        deviation = torch.tensor(std, dtype=torch.float64)
        scale, shift = 1.0 / (255.0 * deviation), torch.tensor(mean, dtype=torch.float64) / deviation
        self.register_buffer("scale", scale.float().reshape(1, 3, 1, 1))
        self.register_buffer("shift", shift.float().reshape(1, 3, 1, 1))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The contract's outputs, in order."""
        return self.network.list_outputs(attention=self.with_attention)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        values = self.explain(self.normalise(images))
        return tuple(values[name] for name in self.output_names)

    def normalise(self, images: Tensor) -> Tensor:
        """Return float32 [N, 3, H0, W0], normalised."""
        if self.input_kind == "float32":
            return images
        # the cast comes first: TensorRT refuses any other first operation on uint8
        return images.float().permute(0, 3, 1, 2) * self.scale - self.shift

    def explain(self, normalised: Tensor) -> dict[str, Tensor]:
        """Return the outputs that the network has, by name, and the projection, float32 [N, K, H, W]."""
        features = self.network.backbone(normalised)
        projected = self.network.head.project(features)
        values = {**vars(self.network.explain_features(features, projected)), PROJECTED: projected}
        return {name: value for name, value in values.items() if value is not None}


class _CastBackbone(nn.Module):
    """A backbone that casts its input to its precision and layout, and its features like the exporter."""

    def __init__(self, backbone: nn.Module, precision: str, *, channels_last: bool) -> None:
        super().__init__()
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.dtype = TYPES[precision]
        # bfloat16 has too few digits for the projection: see `export.precision`
        self.feature_dtype = torch.float32 if precision == "bf16" else self.dtype
        self.backbone = backbone.to(self.dtype).to(memory_format=self.layout)

    def forward(self, images: Tensor) -> Tensor:
        # uint8 images are NHWC and stay so in memory when permuted to NCHW
        features: Tensor = self.backbone(images.to(self.dtype).contiguous(memory_format=self.layout))
        return features.to(self.feature_dtype)


def build_inference_graph(
    network: OpalNetwork, mean: Sequence[float], std: Sequence[float], precision: str, *, channels_last: bool
) -> InferenceGraph:
    """Return the graph of a copy of a network, in evaluation mode, that takes uint8 images.

    Args:
        network: copied, not changed.
        mean, std: per channel, of pixels in [0, 1].
        precision: of the backbone and, except for bf16, the projection: one of `TYPES`; the rest is float32.
        channels_last: lay out convolutions as NHWC.
    """
    network = copy.deepcopy(network).eval()
    backbone = _CastBackbone(network.backbone, precision, channels_last=channels_last)
    network.head.projection.to(backbone.feature_dtype).to(memory_format=backbone.layout)
    network.backbone = backbone  # type: ignore[assignment]  # only `forward` is called from here on
    return InferenceGraph(network, "uint8", mean, std).eval()
