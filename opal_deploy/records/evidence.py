"""Best classes, slot evidence and observations of a batch of outputs, as arrays.

Whole batches are computed at once: microseconds per image, where the same arithmetic image by image can cost more than
a forward pass on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.baseline import Observations, find_places, share_cells
from opal_deploy.artifact.class_map import ClassMap, find_margins
from opal_deploy.artifact.heads import find_contributions, find_norms, to_norms
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import recover_norms
from opal_deploy.artifact.outputs import DoubleArray, Outputs, compute_probabilities, find_largest
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import Answered


@dataclass(frozen=True)
class TopClasses:
    """The k best classes of N images, best first; of equal logits the lowest class first.

    Attributes:
        class_ids: int64 [N, k].
        logits: float64 [N, k], the float32 values exactly.
        totals: float64 [N, k], what contributions add up to: cosines in [-1, 1], or a linear head's logits; None
            without evidence.
        norms: float64 [N], see `heads.find_norms`; None without evidence.
        probabilities: float64 [N, k], calibrated; None if the model has no temperature, or outputs only its best
            classes.
    """

    class_ids: NDArray[np.int64]
    logits: DoubleArray
    totals: DoubleArray | None = None
    norms: DoubleArray | None = None
    probabilities: DoubleArray | None = None


@dataclass(frozen=True)
class SlotEvidence:
    """The slots of one class of each of N images.

    Attributes:
        class_ids: int64 [N].
        cells: int64 [N, m, 2], (row, col) of each slot's maximum.
        scores: float64 [N, m], the float32 values exactly.
        contributions: float64 [N, m], see `heads.find_contributions`; None if the distance is not a sum over slots.
        boxes: float64 [N, m, 4], (x0, y0, x1, y1) of the cells in pixels of the whole oriented images.
    """

    class_ids: NDArray[np.int64]
    cells: NDArray[np.int64]
    scores: DoubleArray
    contributions: DoubleArray | None
    boxes: DoubleArray


def find_top_classes(outputs: Outputs, metadata: Metadata, k: int) -> TopClasses:
    """Return the `k` best classes of each image by logit, or all that the model lists."""
    probabilities = None
    if outputs.top is not None:
        class_ids = outputs.top.classes[:, :k].astype(np.int64)
        logits, scores = outputs.top.logits[:, :k], outputs.top.scores[:, :k]
    else:
        class_ids = find_largest(outputs.logits, k)
        logits = np.take_along_axis(outputs.logits, class_ids, axis=1)
        if (temperature := metadata.temperature) is not None:
            probabilities = compute_probabilities(outputs.logits, class_ids, temperature)
        if metadata.evidence == "regions":
            return TopClasses(class_ids, logits.astype(np.float64), logits.astype(np.float64), None, probabilities)
        if outputs.scores is None:
            return TopClasses(class_ids, logits.astype(np.float64), probabilities=probabilities)
        scores = metadata.class_map.take(outputs.scores, class_ids)
    norms = _compute_norms(outputs, metadata)
    totals = metadata.class_map.totals(scores / norms[:, None, None], class_ids)
    return TopClasses(class_ids, logits.astype(np.float64), totals, norms, probabilities)


def find_evidence(
    outputs: Outputs,
    class_ids: NDArray[np.int64],
    geometries: Sequence[Geometry],
    metadata: Metadata,
    norms: DoubleArray | None = None,
) -> SlotEvidence:
    """Return the evidence of each image for one class, predicted or not.

    Args:
        class_ids: int64 [N]; classes that the model lists, if it lists only the best.
        norms: float64 [N], from `TopClasses`; None: computed.

    Raises:
        ValueError: the model's evidence is not `exact`, or it does not list a class.
    """
    if metadata.evidence != "exact":
        raise ValueError(f"evidence {metadata.evidence!r}: answers do not come from single cells")
    if norms is None:
        norms = _compute_norms(outputs, metadata)
    scores, argmax = _take_slots(outputs, class_ids, metadata.class_map)
    rows, cols = np.divmod(argmax, metadata.grid[1])
    return SlotEvidence(
        class_ids,
        np.stack([rows, cols], axis=2),
        scores,
        find_contributions(scores / norms[:, None], class_ids, metadata),
        find_boxes(metadata, geometries, rows, cols),
    )


def find_boxes(
    metadata: Metadata, geometries: Sequence[Geometry], rows: NDArray[np.int64], cols: NDArray[np.int64]
) -> DoubleArray:
    """Return the boxes of `CellGrid.boxes` inside the N images: a cell in a letterbox's bar has the nearest pixel's."""
    boxes = metadata.cells.boxes([geometry.crop for geometry in geometries], rows, cols)
    sizes = np.array([(geometry.width, geometry.height) for geometry in geometries], np.float64)[:, None]
    low, high = np.clip(boxes[..., :2], 0.0, sizes), np.clip(boxes[..., 2:], 0.0, sizes)
    low = np.where(low < high, low, np.minimum(low, sizes - 1))
    return np.concatenate([low, np.where(low < high, high, low + 1)], axis=2)


def _compute_norms(outputs: Outputs, metadata: Metadata) -> DoubleArray:
    """Return what scores are divided by, float64 [N], see `heads.find_norms`."""
    if outputs.top is not None:
        return to_norms(outputs.top.norm, metadata)
    assert outputs.scores is not None
    return find_norms(outputs.scores, metadata)


def _take_slots(
    outputs: Outputs, class_ids: NDArray[np.int64], class_map: ClassMap
) -> tuple[DoubleArray, NDArray[np.int64]]:
    """Return scores, float64 [N, m], and flat cells, int64 [N, m], of the slots of one class per image."""
    if outputs.top is not None:
        listed = outputs.top.classes == class_ids[:, None]
        if not listed.any(axis=1).all():
            raise ValueError("the model lists only its best classes, and this class is not among them")
        place = np.arange(len(class_ids)), listed.argmax(axis=1)
        return outputs.top.scores[place].astype(np.float64), outputs.top.cells[place].astype(np.int64)
    assert outputs.scores is not None
    assert outputs.argmax is not None
    scores, cells = (class_map.take(values, class_ids) for values in (outputs.scores, outputs.argmax))
    return scores.astype(np.float64), cells.astype(np.int64)


def observe_outputs(outputs: Outputs, metadata: Metadata) -> Observations:
    """Return the observations of N images from their outputs.

    Raises:
        ValueError: the model's evidence is not `exact`.
    """
    best = find_top_classes(outputs, metadata, 2)
    count = len(outputs)
    # exact evidence has totals
    assert best.totals is not None
    assert best.norms is not None
    # boxes are not used
    geometries = [Geometry.whole(*metadata.input_size[::-1])] * count
    evidence = find_evidence(outputs, best.class_ids[:, 0], geometries, metadata, best.norms)
    kept = metadata.class_map.kept[evidence.class_ids]
    unknown = np.full(count, np.nan)
    parts = np.full(kept.shape, np.nan) if evidence.contributions is None else evidence.contributions
    flat = evidence.cells[..., 0] * metadata.grid[1] + evidence.cells[..., 1]
    return Observations(
        evidence.class_ids,
        best.totals[:, 0] if metadata.is_opal else unknown,
        find_margins(best.totals),
        best.norms if metadata.is_opal else unknown,
        share_cells(flat, kept),
        unknown if outputs.ood_score is None else outputs.ood_score.astype(np.float64),
        np.where(kept, evidence.scores, np.nan),
        np.where(kept, parts, np.nan),
        np.where(kept, find_places(evidence.cells, metadata.grid), -1),
    )


def observe_records(records: Sequence[Answered], metadata: Metadata) -> Observations:
    """Return the observations of N records with evidence.

    Raises:
        ValueError: a record has no evidence, or a class, slot or cell that the model does not have.
    """
    count, max_slots, grid = len(records), metadata.class_map.max_slots, metadata.grid
    if not all(record.evidence for record in records):
        raise ValueError("no evidence")
    class_ids = np.array([record.prediction.class_id for record in records], np.int64)
    if (class_ids >= metadata.num_classes).any():
        raise ValueError("a class that the model does not have")
    rows = [(row, slot) for row, record in enumerate(records) for slot in record.evidence]
    places = np.array([(row, slot.slot) for row, slot in rows])
    cells = np.array([slot.cell for _, slot in rows])
    if (places[:, 1] >= max_slots).any() or (cells >= grid).any():
        raise ValueError("a slot or cell that the model does not have")
    at = places[:, 0], places[:, 1]
    values = np.full((2, count, max_slots), np.nan)
    values[0][at] = [slot.score for _, slot in rows]
    # None becomes NaN
    values[1][at] = np.array([slot.contribution for _, slot in rows], np.float64)
    all_cells = np.zeros((count, max_slots, 2), np.int64)
    all_cells[at] = cells
    kept = ~np.isnan(values[0])
    cosines = np.array([record.prediction.cosine for record in records], np.float64)
    return Observations(
        class_ids,
        cosines,
        np.array([record.margin for record in records], np.float64),
        recover_norms(values[0], cosines),
        share_cells(all_cells[..., 0] * grid[1] + all_cells[..., 1], kept),
        np.array([record.ood_score for record in records], np.float64),
        values[0],
        values[1],
        np.where(kept, find_places(all_cells, grid), -1),
    )
