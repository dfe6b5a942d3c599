"""The parts that only the OPAL head has: embedding, six distances to the anchors, and contributions to them.

An anchor (paper, Eq. 1) is a row of the class map: 1/sqrt(m_c) on the class's m_c slots, 0 elsewhere. Logits are minus
the distance from the embedding z to it (Eq. 4), which follows in closed form from sums and extremes over each class's
slots (Supp. E.1). `opal_deploy.model` has the same in torch, with the constants of this module.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import ClassMap, DoubleArray

# inside both logarithms of the kl distance, as the authors do
KL_EPSILON = 1e-8
# smallest argument of a root: at zero the gradient is infinite, and float32 does not resolve smaller ones
TINY = 1e-12
_NORM_ROWS = 8


def embedding(scores: NDArray[np.float32], epsilon: float) -> DoubleArray:
    """Return z = s / (|s| + epsilon) for scores s [N, K]: float64 [N, K], so that no rounding is added."""
    z: DoubleArray = scores.astype(np.float64) / embedding_norms(scores, epsilon)[:, None]
    return z


def embedding_norms(scores: NDArray[np.float32], epsilon: float) -> DoubleArray:
    """Return |s| + epsilon for scores s [N, K]: float64 [N]."""
    # some rows at a time: large temporary arrays cost ten times the arithmetic
    norms = [
        np.linalg.norm(scores[start : start + _NORM_ROWS].astype(np.float64), axis=1)
        for start in range(0, len(scores), _NORM_ROWS)
    ]
    return np.concatenate(norms) + epsilon if norms else np.empty(0)


def recover_norms(scores: DoubleArray, cosines: DoubleArray) -> DoubleArray:
    """Return |s| + epsilon, float64 [N], from one class's cosine [N] and scores [N, m], NaN for dropped slots.

    NaN where the cosine is 0 or not known.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = np.nansum(scores, axis=1) / (cosines * np.sqrt((~np.isnan(scores)).sum(axis=1)))
    return np.where(np.isfinite(norms), norms, np.nan)


def cosines(scores: NDArray[np.float32], class_map: ClassMap, epsilon: float) -> DoubleArray:
    """Return the cosine <z, a_c> of every class for scores [N, K]: float64 [N, C]."""
    return class_map.all_totals(embedding(scores, epsilon))


def contributions(
    z: DoubleArray, class_ids: NDArray[np.integer], class_map: ClassMap, distance: str
) -> DoubleArray | None:
    """Return the contribution of each slot of a class to its logit, float64 [N, m], from the embedding's values [N, m].

    They add up to the cosine <z, a_c> for l2, to the block's share of the distance for l1 and kl, and to its share of
    the cubed distance for l3 (smaller is closer for these three). None for linf and tropical, where one extreme entry
    decides.
    """
    if distance == "l2":
        return class_map.contributions(z, class_ids)
    anchors, values = class_map.weights[class_ids], None
    if distance == "l1":
        values = np.abs(z - anchors)
    elif distance == "l3":
        values = np.abs(z - anchors) ** 3
    elif distance == "kl":
        values = z * (np.log(z + KL_EPSILON) - np.log(anchors + KL_EPSILON))
    return values


def head_constant(class_map: ClassMap, distance: str) -> DoubleArray:
    """Return the constant that the head multiplies with, or subtracts from, the embedding to get a distance.

    For `l2` the anchors' entries, and for `kl` their logarithms: float64 [C, 1], the same for all slots of a class.
    For the other distances the anchors, float64 [C, m], 0 for dropped slots.
    """
    if distance not in ("l2", "kl"):
        return class_map.weights
    entries: DoubleArray = class_map.weights.max(axis=1, keepdims=True)
    return np.log(entries + KL_EPSILON) if distance == "kl" else entries


def compute_logits(scores: NDArray[np.float32], class_map: ClassMap, epsilon: float) -> DoubleArray:
    """Return the logits of the distance l2, float64 [N, C], that scores [N, K] have with this map (paper, Eq. 4)."""
    z = embedding(scores * class_map.kept_prototypes.astype(np.float32), epsilon)
    return -np.sqrt(np.maximum(2.0 - 2.0 * class_map.all_totals(z), TINY))
