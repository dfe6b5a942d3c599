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
from opal_deploy.artifact.outputs import KL_EPSILON, DoubleArray, FloatArray, Outputs, embedding_norms
from opal_deploy.preprocess.geometry import Geometry, cell_boxes

# above so many classes sorting all logits is faster than finding one maximum after another
_MAX_SCANS = 32


@dataclass(frozen=True)
class TopClasses:
    """The k best classes of N images, the best first; of equal logits the lowest class.

    Attributes:
        class_ids: int64 [N, k].
        logits: float64 [N, k], the float32 values exactly.
        cosines: float64 [N, k], in [-1, 1]; None without anchors.
        norms: float64 [N], the norms of the scores, see `embedding_norms`; None without anchors.
    """

    class_ids: NDArray[np.int64]
    logits: DoubleArray
    cosines: DoubleArray | None = None
    norms: DoubleArray | None = None


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
    """Return the `k` best classes of each image by logit, or all classes if there are fewer."""
    class_ids = _find_largest(outputs.logits, min(k, outputs.logits.shape[1]))
    logits = np.take_along_axis(outputs.logits, class_ids, axis=1).astype(np.float64)
    if outputs.scores is None:
        return TopClasses(class_ids, logits)
    norms = embedding_norms(outputs.scores, metadata.epsilon)
    blocks = _take_blocks(outputs.scores, class_ids, metadata) / norms[:, None, None]
    return TopClasses(class_ids, logits, blocks.sum(axis=2) / np.sqrt(metadata.prototypes_per_class), norms)


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
        class_ids: int64 [N].
        geometries: N, of the images.
        metadata: of the model.
        norms: float64 [N], of the scores, where `TopClasses` holds them already.

    Raises:
        ValueError: the model's evidence is not `exact`.
    """
    if metadata.evidence != "exact" or outputs.scores is None or outputs.argmax is None:
        raise ValueError(f"evidence {metadata.evidence!r}: no single cell decided")
    if norms is None:
        norms = embedding_norms(outputs.scores, metadata.epsilon)
    m = metadata.prototypes_per_class
    blocks = _take_blocks(outputs.scores, class_ids[:, None], metadata)[:, 0]
    channels = class_ids[:, None] * m + np.arange(m)  # [N, m]
    rows, cols = np.divmod(np.take_along_axis(outputs.argmax, channels, axis=1).astype(np.int64), metadata.grid[1])
    return SlotEvidence(
        class_ids,
        np.stack([rows, cols], axis=2),
        blocks,
        contributions(blocks / norms[:, None], metadata.distance),
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


def _find_largest(values: FloatArray, k: int) -> NDArray[np.int64]:
    """Return int64 [N, k], the positions of the k largest of each row; of equal ones the first comes first."""
    if k > _MAX_SCANS:
        return np.argsort(-values, axis=1, kind="stable")[:, :k]
    remaining = values.copy()
    positions = np.empty((len(values), k), np.int64)
    for place in range(k):
        best = remaining.argmax(axis=1)
        positions[:, place] = best
        np.put_along_axis(remaining, best[:, None], -np.inf, axis=1)
    return positions


def _take_blocks(scores: FloatArray, class_ids: NDArray[np.int64], metadata: Metadata) -> DoubleArray:
    """Return the scores of some classes' slots: [N, K] and int64 [N, k] to float64 [N, k, m]."""
    blocks = scores.reshape(len(scores), -1, metadata.prototypes_per_class)
    return blocks[np.arange(len(scores))[:, None], class_ids].astype(np.float64)
