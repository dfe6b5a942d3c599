"""Compute values per prototype, contributions, class totals and logits from any head's scores.

OPAL's values are its embedding, its totals are cosines, and its logits are negative distances (`opal_head`). In linear
heads, such as PIP-Net's and ProtoPNet's, the values are the scores, and the totals are the logits W s + b, with W and b
from the class map. Every function takes the metadata, which names the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact import opal_head
from opal_deploy.artifact.class_map import ClassMap, DoubleArray
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs

# slots that a record of a linear head lists; a class may have thousands
MOST_LISTED = 10


def find_norms(scores: NDArray[np.float32], metadata: Metadata) -> DoubleArray:
    """Return the divisor that turns an image's scores [N, P] into values: float64 [N]; 1 for linear heads."""
    return opal_head.embedding_norms(scores, metadata.epsilon) if metadata.is_opal else np.ones(len(scores))


def to_norms(lengths: NDArray[np.float32], metadata: Metadata) -> DoubleArray:
    """Return the same as `find_norms` from the scores' lengths |s|, float32 [N], which a graph may output."""
    return lengths.astype(np.float64) + metadata.epsilon if metadata.is_opal else np.ones(len(lengths))


def find_values(scores: NDArray[np.float32], metadata: Metadata) -> DoubleArray:
    """Return the values of scores [N, P]: float64 [N, P]."""
    return opal_head.embedding(scores, metadata.epsilon) if metadata.is_opal else scores.astype(np.float64)


def find_totals(scores: NDArray[np.float32], metadata: Metadata) -> DoubleArray:
    """Return the total of every class for scores [N, P], float64 [N, C]: cosines, or the logits of linear heads."""
    if metadata.is_opal:
        return opal_head.cosines(scores, metadata.class_map, metadata.epsilon)
    return metadata.class_map.all_totals(scores.astype(np.float64))


def find_contributions(values: NDArray[Any], class_ids: NDArray[np.integer], metadata: Metadata) -> DoubleArray | None:
    """Return what each slot of a class contributes, float64 [N, S], from their values [N, S] and classes [N].

    Contributions of linear heads add up, with the class's bias, to the logit; see `opal_head.contributions` for OPAL's.
    """
    class_map = metadata.class_map
    if metadata.is_opal:
        return opal_head.contributions(values, class_ids, class_map, metadata.distance)
    return class_map.contributions(values, class_ids)


def compute_logits(scores: NDArray[np.float32], class_map: ClassMap, metadata: Metadata) -> DoubleArray:
    """Return the logits that scores [N, P] have with this map, which need not be the model's: float64 [N, C].

    Of OPAL's distances only l2, see `drops.check_drops`.
    """
    if metadata.is_opal:
        return opal_head.compute_logits(scores, class_map, metadata.epsilon)
    return class_map.all_totals(scores.astype(np.float64))


def drop_scores(scores: NDArray[np.float32], metadata: Metadata) -> NDArray[np.float32]:
    """Return the scores [N, P] without dropped slots: OPAL's become 0, linear heads only lose their weights."""
    return scores * metadata.class_map.kept_prototypes.astype(np.float32) if metadata.is_opal else scores


def drop_slots(outputs: Outputs, metadata: Metadata) -> Outputs:
    """Return the outputs of the model with the slots of `metadata`, from its parent's outputs, which have scores."""
    assert outputs.scores is not None
    logits = compute_logits(outputs.scores, metadata.class_map, metadata).astype(np.float32)
    return replace(outputs, logits=logits, scores=drop_scores(outputs.scores, metadata))


def to_distances(scores: NDArray[np.float32], metadata: Metadata) -> DoubleArray:
    """Return the squared distances, float64, that the scores of a `distance` head come from.

    Near distance 0 a score changes by thousands of times as much as its distance, so that gates compare distances.
    """
    epsilon, values = metadata.epsilon, scores.astype(np.float64)
    powers = np.exp(values)
    distances: DoubleArray = np.maximum((1 - epsilon * powers) / np.maximum(powers - 1, 1e-12), 0.0)
    return distances


def find_strongest(contributions: Any, kept: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the slots that a record of a linear head lists, int64 [N, k], and whether each is one, bool [N, k].

    These are the MOST_LISTED slots with the largest absolute contributions, largest first. Slots that contribute
    nothing are left out; if none contributes, one is listed.

    Args:
        contributions: float64 [N, S], of one class per image.
        kept: bool [N, S], whether the class has the slot.
    """
    strength = np.where(kept, np.abs(contributions), -1.0)
    numbers = np.argsort(-strength, axis=1, kind="stable")[:, :MOST_LISTED]
    ordered = np.take_along_axis(strength, numbers, axis=1)
    listed: NDArray[np.bool_] = ordered > 0
    listed[:, 0] |= ordered[:, 0] == 0
    return numbers, listed
