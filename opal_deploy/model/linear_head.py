"""Heads of other prototype networks: a score per prototype, the maximum over cells of a map, and logits W s + b.

`softmax` is PIP-Net's (Nauta et al., CVPR 2023): prototypes are channels of a softmax. `distance` is ProtoPNet's (Chen
et al., NeurIPS 2019): prototypes are vectors, and a score falls with the squared distance to the nearest cell. Classes
share prototypes, with the weights of the class map. `prototype_checkpoint` reads their checkpoints; they are not
trained here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opal_deploy.artifact.documents import Number
from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD, Channels, Evidence
from opal_deploy.errors import UsageError
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.head import HeadOutputs
from opal_deploy.model.network import OpalNetwork


@dataclass(frozen=True)
class LinearHeadConfig:
    """The configuration of a linear head.

    Attributes:
        kind: `softmax` or `distance`.
        threshold: softmax: scores below it are 0.
        similarity: distance: how a score follows from a squared distance d, see `documents.Similarity`.
        epsilon: distance: added to d, as `Similarity` says.
    """

    kind: Literal["softmax", "distance"]
    threshold: Number = 0.0
    similarity: Literal["log"] | None = None
    epsilon: Number = 0.0

    @property
    def evidence(self) -> Evidence:
        """Each score comes from one cell."""
        return "exact"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that matter for this kind, for the metadata."""
        own = ("threshold",) if self.kind == "softmax" else ("similarity", "epsilon")
        return {"kind": self.kind, **{name: getattr(self, name) for name in own}, "dropped": []}


@dataclass(frozen=True)
class LinearNetworkConfig:
    """The configuration of a network with a linear head; attributes as of `NetworkConfig`."""

    backbone: str
    num_classes: int
    input_size: tuple[int, int]
    head: LinearHeadConfig
    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD
    stride: int | None = None
    keep_layers: bool = field(default=False, init=False)
    resize: str = field(default="squash-bilinear", init=False)


class LinearHead(nn.Module):
    """Features to logits and evidence.

    Attributes:
        config: of the head.
        projection: add-on layers: features [N, D, H, W] to G [N, P, H, W] of a softmax head, or to the cells' vectors
            [N, D', H, W] of a distance head.
        prototypes: float32 [P, D', 1, 1], of a distance head.
        class_weights: float32 [P, C], in the layout of the product with scores, so that `edit` finds them in the graph.
        class_biases: float32 [C].
    """

    class_weights: Tensor
    class_biases: Tensor
    prototypes: Tensor

    def __init__(
        self,
        config: LinearHeadConfig,
        projection: nn.Module,
        weights: Tensor,
        biases: Tensor | None = None,
        prototypes: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.projection = projection
        self.register_buffer("class_weights", weights.detach().float().T.contiguous())
        biases = torch.zeros(len(weights)) if biases is None else biases
        self.register_buffer("class_biases", biases.detach().float())
        self.num_prototypes = weights.shape[1]
        if prototypes is not None:
            self.register_buffer("prototypes", prototypes.detach().float())

    def project(self, features: Tensor) -> Tensor:
        """Return the input of the map, float32 (or float64), for features [N, D, H, W]."""
        projected: Tensor = self.projection(features)
        return projected if projected.dtype == torch.float64 else projected.float()

    def explain(self, projected: Tensor) -> HeadOutputs:
        """Return logits, scores, argmax and map for what `project` returns."""
        cells = self._closeness(projected)
        argmax = cells.flatten(2).argmax(2).to(torch.int32)
        scores = self._to_scores(cells.flatten(2).amax(2))
        attention = self._to_scores(cells)
        if self.config.threshold:
            # before the product with the weights, as PIP-Net's inference does
            scores = torch.where(scores < self.config.threshold, torch.zeros_like(scores), scores)
        logits = scores @ self.class_weights + self.class_biases
        return HeadOutputs(logits, scores, argmax, attention)

    def _closeness(self, projected: Tensor) -> Tensor:
        """Return [N, P, H, W], the larger the closer: a softmax, or minus a squared distance."""
        if self.config.kind == "softmax":
            # as `OpalHead.attend`: ONNX Runtime's softmax is ten times faster over the last axis
            cells: Tensor = projected.flatten(2).transpose(1, 2).softmax(dim=2)
            return cells.transpose(1, 2).reshape(projected.shape)
        squares = (projected * projected).sum(1, keepdim=True)
        lengths = (self.prototypes * self.prototypes).sum((1, 2, 3)).reshape(1, -1, 1, 1)
        products = nn.functional.conv2d(projected, self.prototypes)
        return -torch.relu(squares - 2 * products + lengths)

    def _to_scores(self, closeness: Tensor) -> Tensor:
        """Return the scores of a closeness by an increasing function, which leaves the maximum in place."""
        if self.config.kind == "softmax":
            return closeness
        return torch.log((1.0 - closeness) / (self.config.epsilon - closeness))


class LinearNetwork(OpalNetwork):
    """Normalised images, float [N, 3, H0, W0], to the outputs of a linear head; see `OpalNetwork`."""

    def __init__(self, config: LinearNetworkConfig, backbone: Backbone, head: LinearHead) -> None:
        # the parent would build a backbone and OPAL's head
        nn.Module.__init__(self)
        self.config = config  # type: ignore[assignment]
        self.backbone = backbone
        self.head = head  # type: ignore[assignment]
        self.weights_origin = None
        self.neighbours = None
        height, width = config.input_size
        try:
            with torch.no_grad():
                features = backbone.eval()(torch.zeros(1, 3, height, width))
        except RuntimeError as error:
            raise UsageError(f"--size {height}x{width}: too small for the network ({error})") from None
        # cells need not tile the image
        self.grid = features.shape[2], features.shape[3]

    @property
    def weights(self) -> Tensor:
        """The weights W [C, P] of the class map, on the CPU."""
        return self.get_buffer("head.class_weights").float().cpu().T.contiguous()

    @property
    def biases(self) -> Tensor:
        """The biases [C] of the class map, on the CPU."""
        return self.get_buffer("head.class_biases").float().cpu()

    def forward(self, images: Tensor) -> Tensor:
        return self.explain(images).logits
