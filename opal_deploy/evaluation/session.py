"""Metrics of a deployed model: a data set run in any session, of a checkpoint, an ONNX file or an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.attention_maps import CONSISTENCY, PURITY, STABILITY, from_session
from opal_deploy.evaluation.metrics import Evaluation, compute_metrics, margins
from opal_deploy.evaluation.parts import PartFigures, PartMeter
from opal_deploy.evaluation.predictions import predict_samples
from opal_deploy.logs import Progress
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.session import ImageBatch, Session

_NOT_CROPPED = "the protocol crops to the boxes; leave --no-boxes out"


@dataclass(frozen=True)
class EvaluationResult:
    """The metrics and outputs of a model on N images.

    Attributes:
        evaluation: the metrics that need labels only.
        parts: the figures that need part locations; None without.
        labels: [N], class indices.
        outputs: of the model, without attention maps.
        geometries: of the images.
        margins: [N], see `metrics.margins`; None for a model without anchors.
    """

    evaluation: Evaluation
    parts: PartFigures | None
    labels: NDArray[np.int64]
    outputs: Outputs
    geometries: list[Geometry]
    margins: NDArray[np.float64] | None = None

    def to_dict(self, prefix: str) -> dict[str, Any]:
        """Return all metrics for JSON."""
        return {**self.evaluation.to_dict(prefix), **(self.parts.to_dict() if self.parts else {})}


def evaluate_session(
    session: Session,
    samples: list[Sample],
    *,
    boxes: bool = True,
    batch: int = 16,
    workers: int = 2,
    parts: PartLocations | None = None,
    seed: int = 0,
    report: Progress | None = None,
    model: str = "the model",
) -> EvaluationResult:
    """Evaluate a session on `samples` (at least one).

    Args:
        session: of a model whose classes are those of the samples' labels.
        boxes: crop to the samples' boxes; False shows what leaving them out costs.
        batch: images a forward pass.
        workers: threads that decode.
        parts: of the samples; None leaves consistency, stability and purity out.
        seed: of stability's noise, 0 or more.
        report: called with images done and in all.
        model: the name in error messages.

    Raises:
        UsageError: names an image that cannot be used, or the first whose logits are not finite.
    """
    metadata = session.metadata
    labels = np.array([sample.label for sample in samples], dtype=np.int64)
    run: Callable[[ImageBatch], Outputs] = session.run
    meter = None
    if parts is not None:
        source = from_session(session)
        if not boxes:
            reasons = dict.fromkeys((CONSISTENCY, STABILITY, PURITY), _NOT_CROPPED)
            source = replace(source, unavailable={**reasons, **source.unavailable})
        meter = PartMeter(source, parts, labels, seed=seed)
        run = source.run
    outputs, geometries = predict_samples(
        run,
        samples,
        metadata.input_size,
        boxes=boxes,
        batch=batch,
        workers=workers,
        watch=meter,
        report=report,
        model=model,
    )
    m = metadata.prototypes_per_class
    top2_margins = None if outputs.scores is None else margins(outputs.logits, outputs.scores, m, metadata.epsilon)
    evaluation = compute_metrics(outputs.logits, labels, outputs.argmax, m, top2_margins)
    part_figures = meter.figures(outputs.scores, outputs.argmax, geometries) if meter else None
    return EvaluationResult(evaluation, part_figures, labels, outputs, geometries, top2_margins)
