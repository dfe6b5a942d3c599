"""What a batch of outputs says, as arrays: the best classes of each image, and the slots of one class of each.

Records are built from these by the batch: with one pass of numpy over N images an image costs microseconds, where the
same arithmetic image by image costs more than many a model's forward pass on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import (
    KL_EPSILON,
    DoubleArray,
    Outputs,
    compute_probabilities,
    embedding_norms,
    find_largest,
    take_blocks,
)
from opal_deploy.preprocess.geometry import Geometry, cell_boxes


@dataclass(frozen=True)
class TopClasses:
    """The k best classes of N images, the best first; of equal logits the lowest class.

    Attributes:
        class_ids: int64 [N, k].
        logits: float64 [N, k], the float32 values exactly.
        cosines: float64 [N, k], in [-1, 1]; None without anchors.
        norms: float64 [N], the norms of the scores, see `embedding_norms`; None without anchors.
        probabilities: float64 [N, k], calibrated; None for a model without a temperature, and for one that lists its
            best classes alone: the others' logits are part of every probability.
    """

    class_ids: NDArray[np.int64]
    logits: DoubleArray
    cosines: DoubleArray | None = None
    norms: DoubleArray | None = None
    probabilities: DoubleArray | None = None


@dataclass(frozen=True)
class SlotEvidence:
    """The slots of one class of each of N images.

    Attributes:
        class_ids: int64 [N], the class.
        cells: int64 [N, m, 2], (row, col) of each slot's maximum.
        scores: float64 [N, m], the float32 values exactly.
        contributions: float64 [N, m], see `contributions`; None where the distance is no sum over slots.
        boxes: float64 [N, m, 4], the cells' rectangles (x0, y0, x1, y1) in pixels of the whole oriented images.
    """

    class_ids: NDArray[np.int64]
    cells: NDArray[np.int64]
    scores: DoubleArray
    contributions: DoubleArray | None
    boxes: DoubleArray


def find_top_classes(outputs: Outputs, metadata: Metadata, k: int) -> TopClasses:
    """Return the `k` best classes of each image by logit, or all that the model lists if there are fewer."""
    probabilities = None
    if outputs.top is not None:
        class_ids = outputs.top.classes[:, :k].astype(np.int64)
        logits, scores = outputs.top.logits[:, :k], outputs.top.scores[:, :k]
    else:
        class_ids = find_largest(outputs.logits, k)
        logits = np.take_along_axis(outputs.logits, class_ids, axis=1)
        if (temperature := metadata.temperature) is not None:
            probabilities = compute_probabilities(outputs.logits, class_ids, temperature)
        if outputs.scores is None:
            return TopClasses(class_ids, logits.astype(np.float64), probabilities=probabilities)
        scores = take_blocks(outputs.scores, class_ids, metadata.prototypes_per_class)
    norms = _compute_norms(outputs, metadata)
    blocks = scores.astype(np.float64) / norms[:, None, None]
    cosines: DoubleArray = blocks.sum(axis=2) / np.sqrt(metadata.prototypes_per_class)
    return TopClasses(class_ids, logits.astype(np.float64), cosines, norms, probabilities)


def find_evidence(
    outputs: Outputs,
    class_ids: NDArray[np.int64],
    geometries: Sequence[Geometry],
    metadata: Metadata,
    norms: DoubleArray | None = None,
) -> SlotEvidence:
    """Return the evidence of each image for one class, predicted or not.

    Args:
        outputs: of N images.
        class_ids: int64 [N]; of the classes that are listed where the graph lists the best alone.
        geometries: N, of the images.
        metadata: of the model.
        norms: float64 [N], of the scores, where `TopClasses` holds them already.

    Raises:
        ValueError: the model's evidence is not `exact`, or it lists the best classes alone and not this one.
    """
    if metadata.evidence != "exact":
        raise ValueError(f"evidence {metadata.evidence!r}: no single cell decided")
    if norms is None:
        norms = _compute_norms(outputs, metadata)
    scores, argmax = _take_slots(outputs, class_ids, metadata.prototypes_per_class)
    rows, cols = np.divmod(argmax, metadata.grid[1])
    return SlotEvidence(
        class_ids,
        np.stack([rows, cols], axis=2),
        scores,
        contributions(scores / norms[:, None], metadata.distance),
        cell_boxes([geometry.crop for geometry in geometries], rows, cols, metadata.grid),
    )


def contributions(blocks: DoubleArray, distance: str) -> DoubleArray | None:
    """Return the contribution of each slot of a class to its logit.

    Args:
        blocks: float64 [..., m], the embedding's entries of the class's block.
        distance: the head's distance.

    Returns:
        float64 [..., m]. For l2 they add up to the cosine <z, a_c>, for l1 and kl to the block's part of the distance,
        for l3 to the block's part of its third power (smaller is closer for these three). None for linf and tropical,
        where one extreme entry decides.
    """
    anchor = 1.0 / math.sqrt(blocks.shape[-1])
    values: DoubleArray | None = None
    if distance == "l2":
        values = blocks * anchor
    elif distance == "l1":
        values = np.abs(blocks - anchor)
    elif distance == "l3":
        values = np.abs(blocks - anchor) ** 3
    elif distance == "kl":
        values = blocks * (np.log(blocks + KL_EPSILON) - math.log(anchor + KL_EPSILON))
    return values


def _compute_norms(outputs: Outputs, metadata: Metadata) -> DoubleArray:
    """Return |s| + epsilon, float64 [N]."""
    if outputs.top is not None:
        norms: DoubleArray = outputs.top.norm.astype(np.float64) + metadata.epsilon
        return norms
    if outputs.scores is None:
        raise ValueError("the outputs have no scores")
    return embedding_norms(outputs.scores, metadata.epsilon)


def _take_slots(
    outputs: Outputs, class_ids: NDArray[np.int64], prototypes_per_class: int
) -> tuple[DoubleArray, NDArray[np.int64]]:
    """Return the scores, float64 [N, m], and flat cells, int64 [N, m], of the slots of one class of each image."""
    if outputs.top is not None:
        listed = outputs.top.classes == class_ids[:, None]
        if not listed.any(axis=1).all():
            raise ValueError("the model lists the best classes alone, and this class is not among them")
        place = np.arange(len(class_ids)), listed.argmax(axis=1)
        return outputs.top.scores[place].astype(np.float64), outputs.top.cells[place].astype(np.int64)
    if outputs.scores is None or outputs.argmax is None:
        raise ValueError("the outputs have no scores and cells")
    blocks = (
        take_blocks(values, class_ids[:, None], prototypes_per_class) for values in (outputs.scores, outputs.argmax)
    )
    scores, cells = (block[:, 0] for block in blocks)
    return scores.astype(np.float64), cells.astype(np.int64)
