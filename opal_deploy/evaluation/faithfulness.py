"""Faithfulness of the evidence: what removing the evidence cells changes, next to controls, and how stable cells are.

Everything here works on the model's input, uint8 [N, H0, W0, 3] before normalisation, through any session. A cell is
removed by painting its rectangle of the input with a fill; the figure is the cosine of the class predicted for the
unchanged image. A cell's receptive field is larger than its rectangle, so every figure is compared with controls that
remove as many other cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.annotations import Annotations
from opal_deploy.evaluation.metrics import figures_to_dict, format_columns
from opal_deploy.evaluation.options import FILLS, Fill
from opal_deploy.evaluation.perturbation import (
    Curve,
    Curves,
    Perturber,
    SlotStability,
    image_changes,
    measure_stability,
    perturbation_curves,
)
from opal_deploy.evaluation.rankings import CONTRIBUTION, GRAD_CAM, RANDOM, RANKINGS, REVERSE, HeatMap, build_rankings
from opal_deploy.evaluation.session import prepared_batches
from opal_deploy.logs import Progress, no_progress
from opal_deploy.runtime.session import Session
from opal_deploy.statistics import Mean, mean_with_interval

# images measured together: each takes dozens of passes, which fill batches of their own
_IMAGES_TOGETHER = 4

NO_GRADIENTS = "an exported model has no gradients; give the checkpoint"


@dataclass(frozen=True)
class Advantage:
    """The lead of the evidence, ranked by contribution, over another ranking: paired, positive where it wins.

    If an image has fewer cells in the other ranking, the evidence is cut to as many cells.

    Attributes:
        deletion_area: the other's deletion area minus the evidence's.
        insertion_area: the evidence's insertion area minus the other's.
        drop: the evidence's drop minus the other's; None against its own reverse, which removes the same cells.
    """

    deletion_area: Mean
    insertion_area: Mean
    drop: Mean | None


@dataclass(frozen=True)
class RankingFigures:
    """One ranking with one fill, over the images that have it.

    Attributes:
        deletion, insertion: mean cosine after 0, 1, ..., m steps; an image with fewer cells keeps its last value.
        deletion_area, insertion_area, drop: means of the properties of `Curve`.
        class_kept: share of images whose predicted class stays with all cells removed.
        evidence_share: mean share of the cells that are evidence.
        advantage: of the evidence over this ranking; None for the evidence itself.
    """

    fill: Fill
    ranking: str
    images: int
    cells: float
    deletion: list[float]
    insertion: list[float]
    deletion_area: Mean
    insertion_area: Mean
    drop: Mean
    class_kept: float
    evidence_share: float
    advantage: Advantage | None


@dataclass(frozen=True)
class StabilityFigures:
    """The stability of cells under one change of the images.

    Attributes:
        same_cell, within_one_cell: mean shares of slots, see `SlotStability`.
    """

    change: str
    same_cell: Mean
    within_one_cell: Mean
    same_class: float


@dataclass(frozen=True)
class Faithfulness:
    """The faithfulness figures of one model.

    Attributes:
        different_cells: mean number of different evidence cells per image, d.
        unavailable: ranking -> why it is missing, or measured on fewer images, in one line.
    """

    images: int
    images_available: int
    prototypes_per_class: int
    different_cells: float
    forward_passes: int
    random_control: str
    rankings: list[RankingFigures]
    stability: list[StabilityFigures]
    unavailable: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    confidence: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return figures_to_dict(self)


def max_forward_passes(images: int, metadata: Metadata, fills: Sequence[Fill]) -> int:
    """Return the largest number of forward passes, reached if no two slots or rankings share a cell."""
    per_image = len(RANKINGS) * 2 * metadata.class_map.max_slots * len(fills)
    return images * (1 + len(image_changes(0)) + per_image)


def measure_faithfulness(
    session: Session,
    samples: Sequence[Sample],
    chosen: Sequence[int],
    annotations: Annotations,
    *,
    boxes: bool = True,
    fills: Sequence[Fill] = FILLS,
    heat_map: HeatMap | None = None,
    batch: int = 16,
    seed: int = 0,
    center: float = 0.5,
    progress: Progress = no_progress,
) -> Faithfulness:
    """Measure deletion and insertion curves, controls and stability of one model.

    Args:
        chosen: indices of the images to measure, at least one. Random numbers for an image depend on `seed` and its
            index, not on the other images.
        annotations: of the samples; the random control draws from cells that show the object.
        heat_map: Grad-CAM; None leaves that control out.
        center: centre of a cell's receptive field, in cells from the corner of its box (`EffectiveField.center`).

    Raises:
        UsageError: an image cannot be used, or the model's logits are not finite.
    """
    metadata, perturber = session.metadata, Perturber(session, batch)
    curves: list[Curves] = []
    stabilities: list[dict[str, SlotStability]] = []
    different_cells: list[int] = []
    chosen_samples = [samples[index] for index in chosen]
    together = min(batch, _IMAGES_TOGETHER)
    for pixels, geometries in prepared_batches(chosen_samples, metadata.input_size, boxes=boxes, batch=together):
        indices = chosen[len(curves) : len(curves) + len(pixels)]
        outputs = perturber.run(pixels)
        heat_maps = None if heat_map is None else heat_map(pixels, outputs.logits.argmax(axis=1).astype(np.int64))
        rankings = [
            build_rankings(
                outputs,
                row,
                metadata,
                annotations.images[index].foreground(geometry, metadata.grid),
                seed=seed,
                index=index,
                heat_map=None if heat_maps is None else heat_maps[row],
            )
            for row, (index, geometry) in enumerate(zip(indices, geometries, strict=True))
        ]
        stabilities += measure_stability(perturber, pixels, outputs, indices, metadata, seed, center)
        curves += perturbation_curves(perturber, pixels, rankings, indices, metadata.grid, fills, seed)
        different_cells += [len(ranking.evidence) for ranking in rankings]
        progress(len(curves), len(chosen), f"{perturber.forward_passes:,} forward passes")
    unavailable = {} if heat_map is not None else {GRAD_CAM: NO_GRADIENTS}
    without = sum((fills[0], RANDOM) not in by_ranking for by_ranking in curves)
    if without:
        unavailable[RANDOM] = f"{without} of {len(curves)} images left out: all their foreground cells are evidence"
    return Faithfulness(
        len(curves),
        len(samples),
        metadata.class_map.max_slots,
        float(np.mean(different_cells)),
        perturber.forward_passes,
        f"random {annotations.foreground}",
        _summarize_rankings(curves, fills, metadata.class_map.max_slots),
        _summarize_stability(stabilities),
        unavailable,
        seed,
    )


def _summarize_rankings(curves: Sequence[Curves], fills: Sequence[Fill], steps: int) -> list[RankingFigures]:
    """Return the figures by fill, then in the order of `RANKINGS`; a ranking that no image has is left out."""
    figures = []
    for fill in fills:
        for ranking in RANKINGS:
            pairs = [
                (other, by_ranking[fill, CONTRIBUTION].first(other.steps))
                for by_ranking in curves
                if (other := by_ranking.get((fill, ranking))) is not None
            ]
            if pairs:
                figures.append(_summarize(fill, ranking, pairs, steps))
    return figures


def _summarize(fill: Fill, ranking: str, pairs: list[tuple[Curve, Curve]], steps: int) -> RankingFigures:
    ranked = [curve for curve, _ in pairs]
    advantage = None
    if ranking != CONTRIBUTION:
        drops = [evidence.drop - other.drop for other, evidence in pairs]
        advantage = Advantage(
            mean_with_interval([other.deletion_area - evidence.deletion_area for other, evidence in pairs]),
            mean_with_interval([evidence.insertion_area - other.insertion_area for other, evidence in pairs]),
            None if ranking == REVERSE else mean_with_interval(drops),
        )

    def mean_of(name: str) -> float:
        return float(np.mean([getattr(curve, name) for curve in ranked]))

    def mean_curve(name: str) -> list[float]:
        curves = [getattr(curve, name) for curve in ranked]
        padded = [np.pad(curve, (0, steps + 1 - len(curve)), mode="edge") for curve in curves]
        return [float(value) for value in np.mean(padded, axis=0)]

    return RankingFigures(
        fill,
        ranking,
        len(ranked),
        mean_of("steps"),
        mean_curve("deletion"),
        mean_curve("insertion"),
        mean_with_interval([curve.deletion_area for curve in ranked]),
        mean_with_interval([curve.insertion_area for curve in ranked]),
        mean_with_interval([curve.drop for curve in ranked]),
        mean_of("class_kept"),
        mean_of("evidence_share"),
        advantage,
    )


def _summarize_stability(stabilities: Sequence[dict[str, SlotStability]]) -> list[StabilityFigures]:
    return [
        StabilityFigures(
            change,
            mean_with_interval([each[change].same_cell for each in stabilities]),
            mean_with_interval([each[change].within_one_cell for each in stabilities]),
            float(np.mean([each[change].same_class for each in stabilities])),
        )
        for change in stabilities[0]
    ]


def format_faithfulness(measured: Faithfulness) -> Iterator[str]:
    """Yield the figures as lines for a terminal."""
    yield (
        f"faithfulness on {measured.images} of {measured.images_available} images, {measured.forward_passes:,} forward "
        f"passes: cosine of the predicted class while its {measured.different_cells:.1f} different cells (mean; m = "
        f"{measured.prototypes_per_class}) are removed or put back"
    )
    yield f"random: {measured.random_control}, never the evidence"
    for ranking, reason in measured.unavailable.items():
        yield f"{ranking}: {reason}"
    rows = [["", "cells", "evidence", "deletion", "insertion", "drop", "kept"]]
    rows[0] += ["evidence better by: deletion", "insertion", "drop"]
    rows += [[f"{figures.fill}: {figures.ranking}", *_row(figures)] for figures in measured.rankings]
    yield from format_columns(rows)
    yield "deletion, insertion: area under the cosine's curve; drop, kept: cosine and class with all cells removed"
    yield "better by: paired per image, same number of cells; positive where the evidence wins; 95 % bootstrap interval"
    rows = [["stability of cells", "same cell", "within one", "same class"]]
    for change in measured.stability:
        shares = [_interval(share, scale=100, sign="") for share in (change.same_cell, change.within_one_cell)]
        rows.append([change.change, *(f"{share} %" for share in shares), f"{change.same_class:.1%}"])
    yield from format_columns(rows)


def _row(figures: RankingFigures) -> list[str]:
    gain = figures.advantage
    return [
        f"{figures.cells:.1f}",
        f"{figures.evidence_share:.0%}",
        f"{figures.deletion_area.value:.3f}",
        f"{figures.insertion_area.value:.3f}",
        f"{figures.drop.value:.3f}",
        f"{figures.class_kept:.0%}",
        *([""] * 3 if gain is None else map(_interval, (gain.deletion_area, gain.insertion_area, gain.drop))),
    ]


def _interval(mean: Mean | None, *, scale: float = 1.0, sign: str = "+") -> str:
    if mean is None:
        return "-"
    digits = 3 if scale == 1.0 else 1
    value, low, high = (scale * v for v in (mean.value, *mean.interval))
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"
