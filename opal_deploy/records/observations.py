"""The observations of a model's answers, from its outputs; `artifact.baseline` says what they are compared with."""

from __future__ import annotations

import numpy as np

from opal_deploy.artifact.baseline import Observations, find_places, share_cells
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.evidence import find_evidence, find_top_classes


def observe_outputs(outputs: Outputs, metadata: Metadata) -> Observations:
    """Return the observations of N images from their outputs.

    Raises:
        ValueError: the model's evidence is not `exact`.
    """
    best = find_top_classes(outputs, metadata, 2)
    count = len(outputs)
    # exact evidence has anchors
    assert best.cosines is not None
    assert best.norms is not None
    # boxes are not used
    geometries = [Geometry.whole(*metadata.input_size[::-1])] * count
    evidence = find_evidence(outputs, best.class_ids[:, 0], geometries, metadata, best.norms)
    kept = metadata.slots.kept[evidence.class_ids]
    unknown = np.full(count, np.nan)
    parts = np.full(kept.shape, np.nan) if evidence.contributions is None else evidence.contributions
    flat = evidence.cells[..., 0] * metadata.grid[1] + evidence.cells[..., 1]
    return Observations(
        evidence.class_ids,
        best.cosines[:, 0],
        best.cosines[:, 0] - best.cosines[:, 1] if best.cosines.shape[1] > 1 else unknown,
        best.norms,
        share_cells(flat, kept),
        unknown if outputs.strangeness is None else outputs.strangeness.astype(np.float64),
        np.where(kept, evidence.scores, np.nan),
        np.where(kept, parts, np.nan),
        np.where(kept, find_places(evidence.cells, metadata.grid), -1),
    )
