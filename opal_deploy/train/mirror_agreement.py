"""The training term that asks an image and its mirror image for the same cells.

A slot's score comes from the cell where its attention is largest. Where several cells would do, the maximum jumps
between them when the image hardly changes, and the explanation jumps with it. PIP-Net (Nauta et al., CVPR 2023) asks
two views of an image for the same prototypes at each cell; here each slot of the labelled class is asked for the same
cell in both views:

    agreement = mean over the m slots of -log( sum over cells of p(cell) * q(mirrored cell) )

with p and q the softmax over cells of 20 times the attention of the image and of its mirror image. It is 0 where both
choose one and the same cell with certainty. The term changes training only: the exported graph is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opal_deploy.model.network import OpalNetwork

# attention lies in [0, 1]: times 20, a cell that leads by a third of that range takes nearly all
_SHARPNESS = 20.0
_SMALLEST = 1e-6


class MirrorAgreement(nn.Module):
    """A network that is trained on images and their mirror images together.

    Attributes:
        network: the network, whose head has evidence `exact`.
    """

    def __init__(self, network: OpalNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of both views and how far they disagree about cells.

        Args:
            images: normalised, float [n, 3, H0, W0].
            labels: int64 [n].

        Returns:
            Logits [2n, C], first those of the images, then those of their mirror images; disagreement [n], at least 0.
        """
        head = self.network.head
        views = torch.cat([images, images.flip(3)])
        attention = head.attend(head.project(self.network.backbone(views)))  # [2n, K, H, W]
        logits = head.classify(head.pool(attention))
        image, mirrored = attention.chunk(2)
        return logits, measure_disagreement(image, mirrored.flip(3), labels, head.config.prototypes_per_class)


def measure_disagreement(first: Tensor, second: Tensor, labels: Tensor, prototypes_per_class: int) -> Tensor:
    """Return how far two views disagree about the cells of the labelled class's slots, [n], at least 0.

    Args:
        first, second: attention of both views in the same frame, float32 [n, K, H, W].
        labels: int64 [n].
        prototypes_per_class: m.
    """
    slots = labels[:, None] * prototypes_per_class + torch.arange(prototypes_per_class, device=labels.device)  # [n, m]
    rows = torch.arange(len(labels), device=labels.device)[:, None]
    p, q = (view.flatten(2)[rows, slots].mul(_SHARPNESS).softmax(dim=2) for view in (first, second))  # [n, m, H * W]
    return -(p * q).sum(dim=2).clamp_min(_SMALLEST).log().mean(dim=1)
