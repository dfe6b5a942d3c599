"""The measurement of one model's faithfulness, a batch of images at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.faithfulness.figures import (
    RankingFigures,
    StabilityFigures,
    summarize_rankings,
    summarize_stability,
)
from opal_deploy.evaluation.faithfulness.gradcam import HeatMap
from opal_deploy.evaluation.faithfulness.perturbation import (
    BASELINES,
    Baseline,
    Curves,
    Perturber,
    perturbation_curves,
)
from opal_deploy.evaluation.faithfulness.rankings import GRAD_CAM, RANDOM, RANKINGS, Foreground, build_rankings
from opal_deploy.evaluation.faithfulness.stability import SlotStability, image_changes, measure_stability
from opal_deploy.evaluation.predictions import prepared_batches
from opal_deploy.inference.types import Request
from opal_deploy.logs import Progress
from opal_deploy.runtime.session import Session

# images measured before the next ones: each makes dozens of passes, which fill batches of their own
_IMAGES_TOGETHER = 4

NO_GRADIENTS = "an exported model has no gradients; give the checkpoint"


@dataclass(frozen=True)
class Faithfulness:
    """The faithfulness figures of one model.

    Attributes:
        images: how many images.
        available: how many images the data set has.
        prototypes_per_class: m, the most cells that are removed.
        different_cells: mean number of different evidence cells of an image, d.
        forward_passes: counted in images.
        random_control: describes the cells of the random ranking.
        rankings: curves and areas by baseline and ranking.
        stability: of the cells, by change.
        unavailable: ranking -> why it is missing, or measured on fewer images, in one line.
        seed: of all random numbers.
    """

    images: int
    available: int
    prototypes_per_class: int
    different_cells: float
    forward_passes: int
    random_control: str
    rankings: list[RankingFigures]
    stability: list[StabilityFigures]
    unavailable: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their JSON keys."""
        return {
            "images": self.images,
            "of_images": self.available,
            "prototypes_per_class": self.prototypes_per_class,
            "different_cells": self.different_cells,
            "forward_passes": self.forward_passes,
            "random_control": self.random_control,
            "confidence": 0.95,
            "seed": self.seed,
            "removal": [figures.to_dict() for figures in self.rankings],
            "stability": [figures.to_dict() for figures in self.stability],
            "unavailable": self.unavailable,
        }


def check_evidence(metadata: Metadata, model: str) -> None:
    """Check that a model has single cells as evidence, which can be removed.

    Raises:
        UsageError: no single cell is its evidence, or it has one class only.
    """
    reasons = {
        "map": "it averages over all cells (evidence map), so no single cell is its evidence",
        "none": "it has no prototypes (evidence none)",
    }
    if metadata.evidence != "exact":
        raise UsageError(f"{model}: {reasons[metadata.evidence]}; --faithfulness needs a model with evidence exact")


def max_forward_passes(images: int, metadata: Metadata, baselines: Sequence[Baseline]) -> int:
    """Return the most forward passes a measurement takes: no two slots or rankings share a cell."""
    per_image = len(RANKINGS) * 2 * metadata.prototypes_per_class * len(baselines)
    return images * (1 + len(image_changes(0)) + per_image)


def measure_faithfulness(
    session: Session,
    samples: Sequence[Sample],
    chosen: Sequence[int],
    foreground: Foreground,
    *,
    boxes: bool = True,
    baselines: Sequence[Baseline] = BASELINES,
    heat_map: HeatMap | None = None,
    batch: int = 16,
    workers: int = 2,
    seed: int = 0,
    center: float = 0.5,
    report: Progress | None = None,
) -> Faithfulness:
    """Measure deletion and insertion curves, controls and stability of one model.

    Args:
        session: of a model that `check_evidence` accepts.
        samples: the data set's images.
        chosen: indices of the images to measure on, at least one. Random numbers for an image depend on `seed` and its
            index, not on the other images.
        foreground: for the random control.
        boxes: crop to the samples' boxes.
        baselines: that replace removed cells, at least one.
        heat_map: Grad-CAM; None leaves that control out.
        batch: images a forward pass.
        workers: threads that decode.
        seed: 0 or more.
        center: of what a cell sees, in cells from the corner of its box (`EffectiveField.center`).
        report: called with images done and in all.

    Raises:
        UsageError: names an image that cannot be used, or the model's logits are not finite.
    """
    metadata, perturber = session.metadata, Perturber(session, batch)
    curves: list[Curves] = []
    stabilities: list[dict[str, SlotStability]] = []
    different_cells: list[int] = []
    requests = (Request(str(s.path), s.path, s.box if boxes else None) for s in (samples[i] for i in chosen))
    for pixels, geometries in prepared_batches(requests, metadata.input_size, min(batch, _IMAGES_TOGETHER), workers):
        indices = chosen[len(curves) : len(curves) + len(pixels)]
        outputs = perturber.run(pixels)
        heat_maps = None if heat_map is None else heat_map(pixels, outputs.logits.argmax(axis=1).astype(np.int64))
        rankings = [
            build_rankings(
                outputs,
                row,
                metadata,
                foreground.cells(index, geometry),
                seed=seed,
                index=index,
                heat_map=None if heat_maps is None else heat_maps[row],
            )
            for row, (index, geometry) in enumerate(zip(indices, geometries, strict=True))
        ]
        stabilities += measure_stability(perturber, pixels, outputs, indices, metadata, seed, center)
        curves += perturbation_curves(perturber, pixels, rankings, indices, metadata.grid, baselines, seed)
        different_cells += [len(ranking.evidence) for ranking in rankings]
        if report is not None:
            report(len(curves), len(chosen), f"{perturber.forward_passes:,} forward passes")
    unavailable = {} if heat_map is not None else {GRAD_CAM: NO_GRADIENTS}
    without = sum((baselines[0], RANDOM) not in by_ranking for by_ranking in curves)
    if without:
        unavailable[RANDOM] = (
            f"{without} of {len(curves)} images have no foreground cell but evidence, and are left out"
        )
    return Faithfulness(
        len(curves),
        len(samples),
        metadata.prototypes_per_class,
        float(np.mean(different_cells)),
        perturber.forward_passes,
        foreground.name,
        summarize_rankings(curves, baselines, metadata.prototypes_per_class),
        summarize_stability(stabilities),
        unavailable,
        seed,
    )


def choose_samples(samples: list[Sample], limit: int) -> list[int]:
    """Return ascending indices of `limit` samples, or of all if there are no more; the same every time.

    No class has two images more than another that has some left; within a class they lie evenly over its images in
    their order.
    """
    by_class: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_class[sample.label].append(index)
    shares = dict.fromkeys(sorted(by_class), 0)
    remaining = min(limit, len(samples))
    while remaining:
        open_classes = [label for label in shares if shares[label] < len(by_class[label])]
        # fewer images than classes: classes that lie evenly over all of them
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
