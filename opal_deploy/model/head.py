"""The OPAL head (paper, Sec. 3) and its ablated variants (paper, Table 4).

    features    F  [N, D, H, W]   the backbone's last feature map
    projection  G  [N, K, H, W]   1x1 convolution with bias, K = C * m channels: m slots for each of C classes
    attention   A  [N, K, H, W]   softmax over the K channels at each cell (Eq. 2)
    scores      s  [N, K]         maximum of each channel over the cells, at the cell `argmax` (Eq. 3)
    embedding   z  [N, K]         s / (|s| + epsilon) (Sec. 3.3)
    logits      l  [N, C]         -|z - a_c|, a_c = 1/sqrt(m) on the block of class c and 0 elsewhere (Eqs. 1 and 4)

The network's own classifier (`HeadConfig.plain`) maps F to l directly.

Only the projection is learned: the anchors a_c are fixed, and the network never builds them as a matrix. Each slot's
score comes from one cell, and for the Euclidean distance the cosine <z, a_c> is the sum of the m slots of class c
divided by sqrt(m): the slots of the predicted class and their cells are the explanation.

The six distances (Supp. E.1) are in closed form: sums over the blocks (l1, l2, l3, kl) or extremes inside and outside a
block (linf, tropical) replace the differences [N, C, K], so that memory stays O(N * K). Where slots were dropped, both
z and the anchor are zero there, which changes none of the six.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opal_deploy.artifact.opal_head import KL_EPSILON, TINY, head_constant
from opal_deploy.model.config import HeadConfig


@dataclass
class HeadOutputs:
    """The outputs of one forward pass; only logits without anchors.

    Attributes:
        logits: float32 [N, C], minus the distance to each class's anchor; in [-sqrt(2), 0] for `l2` with CWS.
        scores: float32 [N, K], pooled attention; in [0, 1] with CWS.
        argmax: int32 [N, K], the cell of each channel's maximum as `row * W + col`; of equal maxima the lowest index.
        attention: float32 [N, K, H, W]; sums to 1 over K at each cell with CWS.
        ood_score: float32 [N], at least 0; of a network with `Neighbours`, which the head does not know.
    """

    logits: Tensor
    scores: Tensor | None = None
    argmax: Tensor | None = None
    attention: Tensor | None = None
    ood_score: Tensor | None = None


class OpalHead(nn.Module):
    """A backbone's features to logits and evidence.

    Attributes:
        config: the enabled parts, m, the distance and epsilon.
        num_classes: C.
        num_prototypes: K = C * m.
        projection: 1x1 convolution from D to K channels with bias, or the identity.
        anchors: float32 [C, 1] or [C, m], see `opal_head.head_constant`; None without anchors.
        kept: float32 [K, 1], 0 for dropped slots and else 1; None if none was dropped.
        classifier: a dense layer instead of the distance, or the network's own layers from the pooling on; None with
            anchors.
    """

    def __init__(
        self, num_features: int, num_classes: int, config: HeadConfig | None = None, classifier: nn.Module | None = None
    ) -> None:
        """Build the head; `classifier` is for the plain head only, see `backbones.build_classifier`."""
        super().__init__()
        config = HeadConfig() if config is None else config
        if config.plain != (classifier is not None):
            raise ValueError("the plain head, and no other, takes the network's own classifier")
        self.config = config
        self.num_classes = num_classes
        class_map = config.class_map(num_classes)
        self.num_prototypes = class_map.num_prototypes
        width = self.num_prototypes if config.projection else num_features
        self.projection: nn.Module = nn.Conv2d(num_features, width, 1) if config.projection else nn.Identity()
        if classifier is None and not config.anchors:
            classifier = nn.Linear(width, num_classes)
        self.classifier = classifier
        # constants, which the state dict leaves out: the configuration gives them
        self.anchors: Tensor | None
        self.kept: Tensor | None
        constant = head_constant(class_map, config.distance) if config.anchors else None
        mask = class_map.kept_prototypes[:, None] if config.anchors and class_map.dropped else None
        for name, value in (("anchors", constant), ("kept", mask)):
            self.register_buffer(name, None if value is None else torch.tensor(value, dtype=torch.float32), False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits [N, C] for features [N, D, H, W], without evidence, for training."""
        return self.classify(self.pool(self.attend(self.project(features))))

    def explain(self, projected: Tensor) -> HeadOutputs:
        """Return logits, scores, argmax and attention for the projection G [N, K, H, W] that `project` returns."""
        attention = self.attend(projected)
        scores = self.pool(attention)
        logits = self.classify(scores)
        if not self.config.anchors:
            return HeadOutputs(logits)
        # torch.argmax promises the first of equal maxima
        argmax = attention.flatten(2).argmax(2).to(torch.int32)
        return HeadOutputs(logits, scores, argmax, attention)

    def project(self, features: Tensor) -> Tensor:
        """Return G, float32 [N, K, H, W], for features [N, D, H, W].

        From here on everything is float32, whatever the backbone's precision (docs/contract.md); a network in float64
        stays in float64.
        """
        projected: Tensor = self.projection(features)
        return projected if projected.dtype == torch.float64 else projected.float()

    def attend(self, projected: Tensor) -> Tensor:
        """Return A [N, K, H, W]: the softmax of G over the K channels at each cell (Eq. 2), or G itself without CWS."""
        if not self.config.cws:
            return projected
        # ONNX Runtime's softmax is ten times faster over the last axis than over the second
        cells: Tensor = projected.flatten(2).transpose(1, 2).softmax(dim=2)
        return cells.transpose(1, 2).reshape(projected.shape)

    def pool(self, attention: Tensor) -> Tensor:
        """Return s [N, K]: the maximum of each channel of A over the cells (Eq. 3), or their mean.

        Dropped slots have score 0. For the network's own classifier, which pools itself, A is returned unchanged.
        """
        if self.config.plain:
            return attention
        cells = attention.flatten(2)
        if self.kept is not None:
            # before the maximum: OpenVINO fuses a maximum with a product by [K] after it, as in `_l2`
            cells = cells * self.kept
        scores: Tensor = cells.amax(2) if self.config.pooling == "max" else cells.mean(2)
        return scores

    def classify(self, scores: Tensor) -> Tensor:
        """Return the logits [N, C] for scores [N, K]: minus the distance of z to each anchor (Eq. 4)."""
        if self.config.plain and self.classifier is not None:
            own: Tensor = self.classifier(scores)
            return own
        norm = torch.linalg.vector_norm(scores, dim=1, keepdim=True)
        z = scores / (norm + epsilon_tensor(norm, self.config.epsilon))
        if self.classifier is not None:
            logits: Tensor = self.classifier(z)
            return logits
        assert self.anchors is not None  # a head without anchors has a classifier
        return -compute_distances(z, self.anchors, self.config.prototypes_per_class, self.config.distance)


def compute_distances(z: Tensor, anchors: Tensor, prototypes_per_class: int, distance: str) -> Tensor:
    """Return the distances [N, C] of an embedding to the anchors; a logit is a negative distance.

    Args:
        z: float [N, K], L2-normalised; 0 for dropped slots.
        anchors: `opal_head.head_constant` of the distance, [C, 1] or [C, m].
        prototypes_per_class: m; K is a multiple of it.
        distance: a key of `DISTANCE_FUNCTIONS`.
    """
    n, k = z.shape[0], z.shape[1]
    blocks = z.reshape(n, k // prototypes_per_class, prototypes_per_class)  # [N, C, m]
    return DISTANCE_FUNCTIONS[distance](blocks, anchors)


def epsilon_tensor(tensor: Tensor, value: float) -> Tensor:
    """Return `value` as a tensor [1] next to `tensor`: ONNX optimisers take a scalar of 1e-8 for 0 and drop the sum."""
    return tensor.new_full((1,), value)


def _l2(blocks: Tensor, anchors: Tensor) -> Tensor:
    # |z - a|^2 = 2 - 2 <z, a> for unit vectors (paper, Sec. 3.4); slightly negative near saturation, hence the clamp
    cosine = (blocks * anchors).sum(2)
    return (2.0 - 2.0 * cosine).clamp_min(TINY).sqrt()


def _l1(blocks: Tensor, anchors: Tensor) -> Tensor:
    outside = _sum_outside(blocks.abs().sum(2))
    return outside + (blocks - anchors).abs().sum(2)


def _l3(blocks: Tensor, anchors: Tensor) -> Tensor:
    outside = _sum_outside(blocks.abs().pow(3).sum(2))
    return (outside + (blocks - anchors).abs().pow(3).sum(2)).clamp_min(TINY).pow(1.0 / 3.0)


def _kl(blocks: Tensor, log_anchors: Tensor) -> Tensor:
    # sum z (log(z + e) - log(a + e)): the first term is the same for all classes, the second takes two values
    entropy = (blocks * (blocks + epsilon_tensor(blocks, KL_EPSILON)).log()).sum((1, 2)).unsqueeze(1)
    outside = _sum_outside(blocks.sum(2))
    return entropy - (blocks * log_anchors).sum(2) - outside * math.log(KL_EPSILON)


def _linf(blocks: Tensor, anchors: Tensor) -> Tensor:
    outside = _largest_outside(blocks.abs().amax(2))
    return torch.maximum(outside, (blocks - anchors).abs().amax(2))


def _tropical(blocks: Tensor, anchors: Tensor) -> Tensor:
    # max - min of the differences z - a (Lee et al. 2022)
    highest, lowest = blocks.amax(2), blocks.amin(2)
    inside = blocks - anchors
    largest = torch.maximum(_largest_outside(highest), inside.amax(2))
    smallest = torch.minimum(-_largest_outside(-lowest), inside.amin(2))
    return largest - smallest


def _sum_outside(per_class: Tensor) -> Tensor:
    """Return for each class the sum of [N, C] over all others; never negative for non-negative entries."""
    return (per_class.sum(1, keepdim=True) - per_class).clamp_min(0.0)


def _largest_outside(per_class: Tensor) -> Tensor:
    """Return for each class the largest value of [N, C] among the others."""
    best = per_class.topk(2, dim=1).values  # [N, 2]
    # of equal maxima either may be "the" best: both columns then hold the same value
    return torch.where(per_class == best[:, :1], best[:, 1:], best[:, :1])


DISTANCE_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": _l1,
    "l2": _l2,
    "l3": _l3,
    "linf": _linf,
    "kl": _kl,
    "tropical": _tropical,
}
