"""The measurement of one model's faithfulness, a batch of images at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import ProgressCallback, Sample
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
from opal_deploy.runtime.session import Session

# images measured before the next ones: each makes dozens of passes, which fill batches of their own
_TOGETHER = 4

NO_GRADIENTS = "an exported model has no gradients; give the checkpoint"


@dataclass(frozen=True)
class Faithfulness:
    """The faithfulness figures of one model.

    Attributes:
        images: how many images.
        available: how many images the data set has.
        prototypes_per_class: m, the most cells that are removed.
        cells: mean number of different cells of an image, d.
        passes: forward passes that it took, counted in images.
        control: what the random cells are.
        orders: curves and areas by fill and order.
        stability: by change.
        unavailable: order -> one line, why it is not there or on fewer images.
        seed: of everything random.
    """

    images: int
    available: int
    prototypes_per_class: int
    cells: float
    passes: int
    control: str
    orders: list[RankingFigures]
    stability: list[StabilityFigures]
    unavailable: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their JSON keys."""
        return {
            "images": self.images,
            "of_images": self.available,
            "prototypes_per_class": self.prototypes_per_class,
            "different_cells": self.cells,
            "forward_passes": self.passes,
            "random_control": self.control,
            "confidence": 0.95,
            "seed": self.seed,
            "removal": [figures.to_dict() for figures in self.orders],
            "stability": [figures.to_dict() for figures in self.stability],
            "unavailable": self.unavailable,
        }


def check_evidence(metadata: Metadata, model: str) -> None:
    """Check that a model has single cells as evidence, which can be removed.

    Raises:
        UsageError: no single cell is its evidence, or it has one class only.
    """
    why = {
        "map": "it averages over all cells (evidence map), so no single cell is its evidence",
        "none": "it has no prototypes (evidence none)",
    }
    if metadata.evidence != "exact":
        raise UsageError(f"{model}: {why[metadata.evidence]}; --faithfulness needs a model with evidence exact")


def max_forward_passes(images: int, metadata: Metadata, fills: Sequence[Baseline]) -> int:
    """Return the most forward passes a measurement takes: no two slots or rankings share a cell."""
    each = len(RANKINGS) * 2 * metadata.prototypes_per_class * len(fills)
    return images * (1 + len(image_changes(0)) + each)


def measure_faithfulness(
    session: Session,
    samples: Sequence[Sample],
    chosen: Sequence[int],
    foreground: Foreground,
    *,
    boxes: bool = True,
    fills: Sequence[Baseline] = BASELINES,
    heat: HeatMap | None = None,
    batch: int = 16,
    workers: int = 2,
    seed: int = 0,
    report: ProgressCallback | None = None,
) -> Faithfulness:
    """Measure deletion and insertion curves, controls and stability of one model.

    Args:
        session: of a model that `check` accepts.
        samples: the data set's images.
        chosen: indices of those to measure on, at least one. What is random for an image depends on `seed` and its
            index, not on the others.
        foreground: for the random control.
        boxes: crop to the samples' boxes.
        fills: what removed cells are painted with, at least one.
        heat: for Grad-CAM's cells; None leaves that control out.
        batch: images a forward pass.
        workers: threads that decode.
        seed: 0 or more.
        report: called with images done and in all.

    Raises:
        UsageError: names an image that cannot be used, or the model's logits are no numbers.
    """
    metadata, runner = session.metadata, Perturber(session, batch)
    moved: list[Curves] = []
    kept: list[dict[str, SlotStability]] = []
    different: list[int] = []
    requests = (Request(str(s.path), s.path, s.box if boxes else None) for s in (samples[i] for i in chosen))
    for pixels, geometries in prepared_batches(requests, metadata.input_size, min(batch, _TOGETHER), workers):
        indices = chosen[len(moved) : len(moved) + len(pixels)]
        outputs = runner.run(pixels)
        heats = None if heat is None else heat(pixels, outputs.logits.argmax(axis=1).astype(np.int64))
        orders = [
            build_rankings(
                outputs,
                row,
                metadata,
                foreground.cells(index, geometry),
                seed=seed,
                index=index,
                heat=None if heats is None else heats[row],
            )
            for row, (index, geometry) in enumerate(zip(indices, geometries, strict=True))
        ]
        kept += measure_stability(runner, pixels, outputs, indices, metadata, seed)
        moved += perturbation_curves(runner, pixels, orders, indices, metadata.grid, fills, seed)
        different += [len(order.evidence) for order in orders]
        if report is not None:
            report(len(moved), len(chosen), f"{runner.passes:,} forward passes")
    unavailable = {} if heat is not None else {GRAD_CAM: NO_GRADIENTS}
    without = sum((fills[0], RANDOM) not in each for each in moved)
    if without:
        unavailable[RANDOM] = f"{without} of {len(moved)} images have no foreground cell but evidence, and are left out"
    return Faithfulness(
        len(moved),
        len(samples),
        metadata.prototypes_per_class,
        float(np.mean(different)),
        runner.passes,
        foreground.name,
        summarize_rankings(moved, fills, metadata.prototypes_per_class),
        summarize_stability(kept),
        unavailable,
        seed,
    )


def choose_samples(samples: list[Sample], limit: int) -> list[int]:
    """Return ascending indices of `limit` samples, or of all if there are no more; the same every time.

    No class has two images more than another that has some left; within a class they lie evenly over its images in
    their order.
    """
    of_class: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        of_class[sample.label].append(index)
    shares = dict.fromkeys(sorted(of_class), 0)
    left = min(limit, len(samples))
    while left:
        open_classes = [label for label in shares if shares[label] < len(of_class[label])]
        # fewer images than classes: classes that lie evenly over all of them
        if left < len(open_classes):
            open_classes = [open_classes[i] for i in _evenly(len(open_classes), left)]
        for label in open_classes:
            shares[label] += 1
        left -= len(open_classes)
    chosen = [of_class[label][i] for label, share in shares.items() for i in _evenly(len(of_class[label]), share)]
    return sorted(chosen)


def _evenly(number: int, share: int) -> list[int]:
    """Return `share` different indices spread evenly over `number`."""
    return [int(place) for place in (np.arange(share) * number) // max(share, 1)]
