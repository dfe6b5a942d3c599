"""Terms of the training loss that act on the attention; the exported graph stays the same.

Mirror agreement trains an image and its mirror image to choose the same cells. A slot's score comes from the cell where
its attention is largest. Where several cells are nearly equal, the maximum jumps between them when the image hardly
changes, and the explanation jumps with it. PIP-Net (Nauta et al., CVPR 2023) aligns the prototypes of two views at each
cell. Here each slot of the labelled class is trained to choose the same cell in both views:

    agreement = mean over the m slots of -log( sum over cells of p(cell) * q(mirrored cell) )

with p and q the softmax over cells of 20 times the attention of the image and of its mirror image. It is 0 where both
choose the same cell with certainty.

Kept-off regions, such as a photographer's stamp, should give the labelled class no evidence. Its slots are penalised
for their scores there:

    penalty = mean over the m slots of the maximum over cells of (share of the cell in the region) * A(slot, cell)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.adversarial import Adversary

# attention lies in [0, 1]: times 20, a cell that leads by a third of that range takes nearly all
_SHARPNESS = 20.0
_SMALLEST = 1e-6


class Terms(NamedTuple):
    """The terms of the loss for n images.

    Attributes:
        logits: [n, C], or with mirror agreement [2n, C], first the images', then their mirror images'.
        disagreement: how far mirror images disagree about cells, [n], at least 0.
        kept_off: the penalty of kept-off regions, [n], 0 ... 1.
        changed: logits of images changed outside the boxes, [n, C]; None without an adversary.
        drop: mean drop of the labelled class's scores in the changed images, [n], at least 0; likewise.
    """

    logits: Tensor
    disagreement: Tensor
    kept_off: Tensor
    changed: Tensor | None = None
    drop: Tensor | None = None


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

    def forward(self, features: Tensor, labels: Tensor, regions: Tensor | None) -> Terms:
        """Return the terms of the loss.

        Args:
            features: [n, D, H, W], or with mirror agreement [2n, D, H, W], first the images, then their mirror images.
            labels: int64 [n].
            regions: share of each pixel or cell that is kept off, float [n, rows, cols], 0 ... 1; None for no penalty.
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
        return Terms(logits, disagreement, penalty)

    def attend(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, C] and the attention of the labelled class's slots [n, m, H * W] for features."""
        attention = self.head.attend(self.head.project(features))
        return self.head.classify(self.head.pool(attention)), _gather(attention, self.channel_table[labels])

    def average(self, values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean [n] of values [n, m] of the labelled class's slots, without dropped ones."""
        kept = None if self.head.kept is None else self.head.kept.flatten()
        return _mean_over_slots(values, self.channel_table[labels], kept)


class NetworkTerms(nn.Module):
    """A network with the terms of its attention in the loss: `HeadTerms` on normalised images [n, 3, H0, W0].

    Attributes:
        adversary: changes images outside the boxes; None trains on unchanged images only.
    """

    def __init__(self, network: OpalNetwork, *, agreement: bool = False, adversarial: bool = False) -> None:
        super().__init__()
        self.backbone = network.backbone
        self.terms = HeadTerms(network.head, agreement=agreement)
        self.adversary = Adversary(network.config, network.grid) if adversarial else None

    def forward(self, images: Tensor, labels: Tensor, regions: Tensor | None) -> Terms:
        views = torch.cat([images, images.flip(3)]) if self.terms.agreement else images
        features = self.backbone(views)
        terms: Terms = self.terms(features, labels, regions)
        if self.adversary is None:
            return terms
        with torch.no_grad():
            scores, cells = self.terms.attend(features[: len(labels)], labels)[1].max(dim=2)
        training = self.backbone.training
        # with the batch statistics of unchanged images, as in inference
        self.backbone.eval()
        changed = self.adversary.change(
            images, cells, self._list_slots(labels), lambda each: self._measure_score(each, labels)
        )
        logits, attention = self.terms.attend(self.backbone(changed), labels)
        self.backbone.train(training)
        drop = (scores - attention.gather(2, cells[..., None])[..., 0]).clamp_min(0)
        return terms._replace(changed=logits, drop=self.terms.average(drop, labels))

    def _measure_score(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean score of the labelled class's slots, [n]."""
        _, attention = self.terms.attend(self.backbone(images), labels)
        return self.terms.average(attention.amax(dim=2), labels)

    def _list_slots(self, labels: Tensor) -> Tensor:
        """Return which of the labelled class's slots were not dropped, bool [n, m]."""
        channels, kept = self.terms.channel_table[labels], self.terms.head.kept
        return torch.ones_like(channels, dtype=torch.bool) if kept is None else kept.flatten()[channels] > 0


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
