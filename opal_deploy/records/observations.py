"""The observations of a model's answers, from its outputs or from records; `artifact.baseline` is made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opal_deploy.artifact.baseline import Observations, find_places, share_cells
from opal_deploy.artifact.class_map import find_margins
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import recover_norms
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.evidence import find_evidence, find_top_classes
from opal_deploy.records.record import Answered


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
        best.totals[:, 0],
        find_margins(best.totals),
        best.norms,
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
    values[1][at] = [_or_nan(slot.contribution) for _, slot in rows]
    all_cells = np.zeros((count, max_slots, 2), np.int64)
    all_cells[at] = cells
    kept = ~np.isnan(values[0])
    cosines = np.array([_or_nan(record.prediction.cosine) for record in records])
    return Observations(
        class_ids,
        cosines,
        np.array([_or_nan(record.margin) for record in records]),
        recover_norms(values[0], cosines),
        share_cells(all_cells[..., 0] * grid[1] + all_cells[..., 1], kept),
        np.array([_or_nan(record.ood_score) for record in records]),
        values[0],
        values[1],
        np.where(kept, find_places(all_cells, grid), -1),
    )


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
