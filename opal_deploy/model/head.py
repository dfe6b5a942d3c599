"""The OPAL head (paper, Sec. 3) and its ablated variants.

features [N, D, H, W] -> projection [N, K, H, W] -> attention (softmax over K at each cell) -> scores [N, K] (max over
cells) -> embedding z = s / (|s| + epsilon) -> logits [N, C] = -distance(z, anchors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opal_deploy.model.config import HeadConfig
from opal_deploy.model.distances import compute_distances, epsilon_tensor


@dataclass
class HeadOutputs:
    """One forward pass.

    Attributes:
        logits: [N, C].
        scores: [N, K], pooled attention; None without anchors.
        argmax: int32 [N, K], flat row-major cell of each channel's maximum, of equal maxima the lowest.
        attention: [N, K, H, W].
    """

    logits: Tensor
    scores: Tensor | None = None
    argmax: Tensor | None = None
    attention: Tensor | None = None


class OpalHead(nn.Module):
    """See the module's docstring; `config` says which parts are on.

    Attributes:
        projection: 1x1 convolution D -> K with bias, or identity.
        classifier: dense layer, only without anchors.
    """

    def __init__(self, num_features: int, num_classes: int, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = num_classes
        self.num_prototypes = num_classes * config.prototypes_per_class
        width = self.num_prototypes if config.projection else num_features
        self.projection: nn.Module = nn.Conv2d(num_features, width, 1) if config.projection else nn.Identity()
        self.classifier: nn.Linear | None = None if config.anchors else nn.Linear(width, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """[N, D, H, W] to logits [N, C]; what training needs, without the evidence."""
        return self.classify(self.pool(self.attend(self.project(features))))

    def explain(self, projected: Tensor) -> HeadOutputs:
        """From `project`'s [N, K, H, W] to everything that the exported graph answers with."""
        attention = self.attend(projected)
        scores = self.pool(attention)
        logits = self.classify(scores)
        if not self.config.anchors:
            return HeadOutputs(logits)
        # torch.argmax promises the first of equal maxima
        argmax = attention.flatten(2).argmax(2).to(torch.int32)
        return HeadOutputs(logits, scores, argmax, attention)

    def project(self, features: Tensor) -> Tensor:
        """[N, D, H, W] to [N, K, H, W], float32: from here on whatever the body's precision (DESIGN, contract)."""
        projected: Tensor = self.projection(features)
        return projected.float()

    def attend(self, projected: Tensor) -> Tensor:
        """Channel-wise softmax over K at each cell, where it is on (paper, Eq. 2)."""
        if not self.config.cws:
            return projected
        # over the last axis ONNX Runtime is ten times faster than over the second
        cells: Tensor = projected.flatten(2).transpose(1, 2).softmax(dim=2)
        return cells.transpose(1, 2).reshape(projected.shape)

    def pool(self, attention: Tensor) -> Tensor:
        """[N, K, H, W] to scores [N, K] (paper, Eq. 3)."""
        cells = attention.flatten(2)
        scores: Tensor = cells.amax(2) if self.config.pooling == "max" else cells.mean(2)
        return scores

    def classify(self, scores: Tensor) -> Tensor:
        """Scores [N, K] to logits [N, C] (paper, Eq. 4)."""
        norm = torch.linalg.vector_norm(scores, dim=1, keepdim=True)
        z = scores / (norm + epsilon_tensor(norm, self.config.epsilon))
        if self.classifier is not None:
            logits: Tensor = self.classifier(z)
            return logits
        return -compute_distances(z, self.config.prototypes_per_class, self.config.distance)


def build_anchors(num_classes: int, prototypes_per_class: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """a_c as a matrix [C, K]: 1/sqrt(m) on each class's block (paper, Eq. 1). The network itself never builds it."""
    matrix = torch.zeros(num_classes, num_classes, prototypes_per_class, dtype=dtype)
    matrix[torch.arange(num_classes), torch.arange(num_classes)] = prototypes_per_class**-0.5
    return matrix.reshape(num_classes, -1)
