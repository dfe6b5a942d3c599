"""Run a labelled data set through a session, and compute the metrics of its outputs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.heads import find_values
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.metrics import Evaluation, collapse_per_image, compute_metrics, margins
from opal_deploy.evaluation.parts import PartFigures, PartMeter
from opal_deploy.logs import Progress, no_progress
from opal_deploy.predict.executor import prefetch
from opal_deploy.predict.prepare import prepare
from opal_deploy.predict.types import InferenceOptions, Pixels, Prepared
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.session import ImageBatch, Session
from opal_deploy.sources.image import InputImage

# threads that decode images
_WORKERS = 2


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics and outputs of a model on N images.

    Attributes:
        labels: [N], class indices.
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
    parts: PartLocations | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
    model: str = "the model",
) -> EvaluationResult:
    """Evaluate a session on `samples` (at least one).

    Args:
        parts: the samples' part locations; None leaves out consistency, stability and purity.

    Raises:
        UsageError: an image cannot be used, or the logits for an image are not finite.
    """
    metadata = session.metadata
    labels = np.array([sample.label for sample in samples], dtype=np.int64)
    meter = None if parts is None else PartMeter(session, parts, labels, cropped=boxes, seed=seed)
    run: Callable[[ImageBatch], Outputs] = session.run if meter is None else meter.run
    batches: list[Outputs] = []
    geometries: list[Geometry] = []
    for pixels, batch_geometries in prepared_batches(samples, metadata.input_size, boxes=boxes, batch=batch):
        outputs, done = run(pixels), len(geometries)
        _check_finite(outputs, samples[done : done + len(pixels)], model)
        if meter is not None:
            meter.add(done, pixels, outputs)
        # attention maps are too large to keep
        batches.append(replace(outputs, attention=None))
        geometries += batch_geometries
        progress(len(geometries), len(samples), "evaluating")
    outputs = Outputs.concatenate(batches)
    collapse, top2_margins = None, None
    if outputs.argmax is not None and outputs.scores is not None:
        collapse = collapse_per_image(outputs.argmax, labels, metadata.class_map)
        top2_margins = margins(outputs.logits, find_values(outputs.scores, metadata), metadata.class_map)
    evaluation = compute_metrics(outputs.logits, labels, collapse, top2_margins)
    part_figures = meter.figures(outputs.scores, outputs.argmax, geometries) if meter else None
    return EvaluationResult(evaluation, part_figures, labels, outputs, geometries, top2_margins)


def _check_finite(outputs: Outputs, samples: list[Sample], model: str) -> None:
    """Raise UsageError if a row of logits is not finite; argmax and means would hide it."""
    finite = np.isfinite(outputs.logits).all(axis=1)
    if not finite.all():
        raise UsageError(
            f"{model}: its logits for {samples[int(finite.argmin())].path} are not finite numbers; its weights are "
            "damaged or its precision is too low: use an earlier checkpoint, or export fp32"
        )


def prepared_batches(
    samples: Sequence[Sample], size: tuple[int, int], *, boxes: bool = True, batch: int
) -> Iterator[tuple[Pixels, list[Geometry]]]:
    """Yield uint8 [n, H0, W0, 3] for up to `batch` samples at a time, prepared as in inference, with their geometries.

    Raises:
        UsageError: an image cannot be used.
    """

    def prepared(sample: Sample) -> Prepared:
        request = InputImage(str(sample.path), sample.path, sample.box if boxes else None)
        return prepare(request, size, InferenceOptions())

    with ThreadPoolExecutor(_WORKERS, "decode") as pool:
        ready = prefetch((pool.submit(prepared, sample) for sample in samples), 2 * batch)
        while group := list(itertools.islice(ready, batch)):
            images = [_check_usable(entry) for entry in group]
            yield np.stack([pixels for pixels, _ in images]), [geometry for _, geometry in images]


def _check_usable(entry: Prepared) -> tuple[Pixels, Geometry]:
    if entry.pixels is None or entry.geometry is None:
        raise UsageError(f"{entry.input.name}: {entry.error or 'unusable'}; remove it from the data set")
    return entry.pixels, entry.geometry


def choose_samples(samples: Sequence[Sample], limit: int) -> list[int]:
    """Return ascending indices of `limit` samples, or of all if there are fewer; deterministic.

    The counts of classes differ by at most one, except where a class has no images left; within a class the choice is
    spread evenly over its images.
    """
    by_class: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_class[sample.label].append(index)
    shares = dict.fromkeys(sorted(by_class), 0)
    remaining = min(limit, len(samples))
    while remaining:
        open_classes = [label for label in shares if shares[label] < len(by_class[label])]
        if remaining < len(open_classes):
            open_classes = [open_classes[i] for i in _spread(len(open_classes), remaining)]
        for label in open_classes:
            shares[label] += 1
        remaining -= len(open_classes)
    chosen = [by_class[label][i] for label, share in shares.items() for i in _spread(len(by_class[label]), share)]
    return sorted(chosen)


def _spread(number: int, share: int) -> list[int]:
    """Return `share` different indices spread evenly over `number`."""
    return [int(index) for index in (np.arange(share) * number) // max(share, 1)]
