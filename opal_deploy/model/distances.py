"""Distances from an embedding z [N, K] to every class anchor a_c, in closed form (paper, Eq. 4 and Supp. E.1).

An anchor is 1/sqrt(m) on its own block and zero elsewhere, so sums over the blocks (l1, l2, l3, kl) or extremes inside
and outside a block (linf, tropical) replace the differences [N, C, K]; memory stays O(N * K). Where slots were dropped,
both z and the anchor are zero there, which changes none of the six.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from opal_deploy.artifact.opal_head import KL_EPSILON, TINY


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
