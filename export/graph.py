"""The network as it is exported: uint8 pictures in, logits and evidence out (DESIGN: the graph's contract)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opal_deploy.artifact.metadata import InputKind
from opal_deploy.export.graph_edit import BODY_INPUT, BODY_OUTPUT
from opal_deploy.model.network import OpalNetwork

ATTENTION = "attention"


class ExportGraph(nn.Module):
    """Wraps a network for tracing.

    Input `images`: uint8 [N, H0, W0, 3] RGB, or float32 [N, 3, H0, W0] already normalised. Returns a tuple: the outputs
    in the order of `output_names`, then the tensors of `marker_names`, which name the body's two ends in the graph.
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
        """Names of the contract's outputs, in order."""
        if self.network.config.head.evidence == "none":
            return ("logits",)
        return ("logits", "argmax", "scores", *((ATTENTION,) if self.with_attention else ()))

    @property
    def marker_names(self) -> tuple[str, ...]:
        """Names of the body's ends; a normalised input is the graph's own `images`."""
        return (BODY_INPUT, BODY_OUTPUT) if self.input_kind == "uint8" else (BODY_OUTPUT,)

    def example(self) -> Tensor:
        """A batch of two to trace with; one would be taken for a constant."""
        height, width = self.network.config.input_size
        if self.input_kind == "uint8":
            return torch.zeros(2, height, width, 3, dtype=torch.uint8)
        return torch.zeros(2, 3, height, width)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        normalised = images
        if self.input_kind == "uint8":
            # the cast comes first: TensorRT refuses any other first operation on uint8
            normalised = images.float().permute(0, 3, 1, 2) * self.scale - self.shift
        projected = self.network.head.project(self.network.backbone(normalised))
        found = self.network.head.explain(projected)
        values = {
            "logits": found.logits,
            "argmax": found.argmax,
            "scores": found.scores,
            ATTENTION: found.attention,
            BODY_INPUT: normalised,
            BODY_OUTPUT: projected,
        }
        wanted = (*self.output_names, *self.marker_names)
        return tuple(value for name in wanted if (value := values[name]) is not None)
