"""Terms of the training loss that act on the attention; the exported graph stays the same.

Mirror agreement asks an image and its mirror image for the same cells. A slot's score comes from the cell where its
attention is largest. Where several cells would do, the maximum jumps between them when the image hardly changes, and
the explanation jumps with it. PIP-Net (Nauta et al., CVPR 2023) asks two views of an image for the same prototypes at
each cell; here each slot of the labelled class is asked for the same cell in both views:

    agreement = mean over the m slots of -log( sum over cells of p(cell) * q(mirrored cell) )

with p and q the softmax over cells of 20 times the attention of the image and of its mirror image. It is 0 where both
choose the same cell with certainty.

Kept-off regions, such as a photographer's stamp, should give the labelled class no evidence. Its slots pay for what
they would score there:

    penalty = mean over the m slots of the maximum over cells of (share of the cell in the region) * A(slot, cell)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork

# attention lies in [0, 1]: times 20, a cell that leads by a third of that range takes nearly all
_SHARPNESS = 20.0
_SMALLEST = 1e-6


class HeadTerms(nn.Module):
    """A head with the terms of its attention in the loss, on features of the backbone.

    Attributes:
        head: the head, whose evidence is `exact` if there are any terms.
        agreement: whether features of mirror images follow those of the images.
    """

    def __init__(self, head: OpalHead, *, agreement: bool) -> None:
        super().__init__()
        self.head = head
        self.agreement = agreement
        self.channel_table: Tensor
        table = head.config.class_map(head.num_classes).channel_table
        self.register_buffer("channel_table", torch.from_numpy(table), persistent=False)

    def forward(self, features: Tensor, labels: Tensor, regions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, how far mirror images disagree about cells, and the penalty of kept-off regions.

        Args:
            features: [n, D, H, W], or with mirror agreement [2n, D, H, W], first the images, then their mirror images.
            labels: int64 [n].
            regions: share of each pixel or cell that is kept off, float [n, rows, cols], 0 ... 1; None for no penalty.

        Returns:
            Logits [n, C] or [2n, C], in the order of the features; disagreement [n] and penalty [n], at least 0.
        """
        head, channels = self.head, self.channel_table[labels]  # [n, m]
        kept = None if head.kept is None else head.kept.flatten()
        attention = head.attend(head.project(features))  # [n or 2n, K, H, W]
        logits = head.classify(head.pool(attention))
        first = attention[: len(labels)]
        disagreement = penalty = logits.new_zeros(len(labels), dtype=torch.float32)
        if self.agreement:
            disagreement = measure_disagreement(first, attention[len(labels) :].flip(3), channels, kept)
        if regions is not None:
            penalty = measure_kept_off(first, channels, regions, kept)
        return logits, disagreement, penalty


class NetworkTerms(nn.Module):
    """A network with the terms of its attention in the loss: `HeadTerms` on normalised images [n, 3, H0, W0]."""

    def __init__(self, network: OpalNetwork, *, agreement: bool) -> None:
        super().__init__()
        self.backbone = network.backbone
        self.terms = HeadTerms(network.head, agreement=agreement)

    def forward(self, images: Tensor, labels: Tensor, regions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        views = torch.cat([images, images.flip(3)]) if self.terms.agreement else images
        terms: tuple[Tensor, Tensor, Tensor] = self.terms(self.backbone(views), labels, regions)
        return terms


def measure_disagreement(first: Tensor, second: Tensor, channels: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return how far two views disagree about the cells of the labelled class's slots, [n], at least 0.

    Args:
        first, second: attention of both views in the same frame, float32 [n, K, H, W].
        channels: int64 [n, m], of the labelled classes' slots.
        kept: float [K], 0 for dropped slots, which do not count, and else 1; None if none was dropped.
    """
    p, q = (_gather(view, channels).mul(_SHARPNESS).softmax(dim=2) for view in (first, second))
    return _mean_over_slots(-(p * q).sum(dim=2).clamp_min(_SMALLEST).log(), channels, kept)


def measure_kept_off(attention: Tensor, channels: Tensor, regions: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return the attention of the labelled class's slots in kept-off regions, [n], 0 ... 1.

    Args:
        attention: float32 [n, K, H, W].
        channels: int64 [n, m], of the labelled classes' slots.
        regions: share of each pixel or cell that is kept off, float [n, rows, cols], 0 ... 1.
        kept: float [K], 0 for dropped slots, which do not count, and else 1; None if none was dropped.
    """
    height, width = attention.shape[2:]
    shares = functional.adaptive_avg_pool2d(regions[:, None], (height, width)).flatten(2)  # [n, 1, H * W]
    return _mean_over_slots((_gather(attention, channels) * shares).amax(dim=2), channels, kept)


def _mean_over_slots(values: Tensor, channels: Tensor, kept: Tensor | None) -> Tensor:
    """Return the mean [n] of the values [n, m] of channels [n, m] that were not dropped."""
    if kept is None:
        return values.mean(dim=1)
    weights = kept[channels]
    return (values * weights).sum(dim=1) / weights.sum(dim=1)


def _gather(attention: Tensor, channels: Tensor) -> Tensor:
    """Return the attention [n, m, H * W] of n images' channels [n, m]."""
    rows = torch.arange(len(channels), device=channels.device)[:, None]
    return attention.flatten(2)[rows, channels]
