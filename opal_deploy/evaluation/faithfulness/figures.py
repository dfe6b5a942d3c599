"""Figures with confidence intervals from the curves of single images, each control paired image by image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opal_deploy.evaluation.faithfulness.perturbation import Baseline, Curve, Curves
from opal_deploy.evaluation.faithfulness.rankings import CONTRIBUTION, RANKINGS, REVERSE
from opal_deploy.evaluation.faithfulness.stability import SlotStability
from opal_deploy.statistics import Mean, mean_with_interval


@dataclass(frozen=True)
class Advantage:
    """By how much the evidence, ranked by contribution, beats another ranking: paired, positive where it does.

    Where an image has fewer cells in the other ranking, the evidence is cut to as many cells.

    Attributes:
        deletion: the other's deletion area minus the evidence's.
        insertion: the evidence's insertion area minus the other's.
        drop: the evidence's drop minus the other's; None against its own reverse, which removes the same cells.
    """

    deletion: Mean
    insertion: Mean
    drop: Mean | None


@dataclass(frozen=True)
class RankingFigures:
    """One ranking with one baseline, over the images that have it.

    Attributes:
        baseline, ranking: their names.
        images: how many images have the ranking.
        cells: mean number of cells that were removed.
        deletion, insertion: mean cosine after 0, 1, ..., m steps; an image with fewer cells stays where it then is.
        deletion_area, insertion_area, drop: means of the properties of `Curve`.
        class_kept: share of images whose predicted class stays with all cells removed.
        evidence_share: mean share of the cells that are evidence.
        advantage: of the evidence over this ranking; None for the evidence itself.
    """

    baseline: Baseline
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

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their JSON keys."""
        document: dict[str, Any] = {
            "fill": self.baseline,
            "order": self.ranking,
            "images": self.images,
            "cells": self.cells,
            "deletion": self.deletion,
            "insertion": self.insertion,
            "deletion_area": self.deletion_area.to_dict(),
            "insertion_area": self.insertion_area.to_dict(),
            "drop": self.drop.to_dict(),
            "class_kept": self.class_kept,
            "cells_that_are_evidence": self.evidence_share,
        }
        if self.advantage is not None:
            drop = self.advantage.drop
            document["evidence_better_by"] = {
                "deletion_area": self.advantage.deletion.to_dict(),
                "insertion_area": self.advantage.insertion.to_dict(),
                "drop": None if drop is None else drop.to_dict(),
            }
        return document


def summarize_rankings(curves: Sequence[Curves], baselines: Sequence[Baseline], steps: int) -> list[RankingFigures]:
    """Return the figures by baseline, then in the order of `RANKINGS`; a ranking that no image has is left out.

    Args:
        curves: one mapping per image, at least one.
        baselines: those measured.
        steps: m.
    """
    figures = []
    for baseline in baselines:
        for ranking in RANKINGS:
            pairs = [
                (other, by_ranking[baseline, CONTRIBUTION].first(other.steps))
                for by_ranking in curves
                if (other := by_ranking.get((baseline, ranking))) is not None
            ]
            if pairs:
                figures.append(_summarize(baseline, ranking, pairs, steps))
    return figures


def _summarize(baseline: Baseline, ranking: str, pairs: list[tuple[Curve, Curve]], steps: int) -> RankingFigures:
    ranked = [curve for curve, _ in pairs]
    advantage = None
    if ranking != CONTRIBUTION:
        advantage = Advantage(
            mean_with_interval([other.deletion_area - evidence.deletion_area for other, evidence in pairs]),
            mean_with_interval([evidence.insertion_area - other.insertion_area for other, evidence in pairs]),
            None
            if ranking == REVERSE
            else mean_with_interval([evidence.drop - other.drop for other, evidence in pairs]),
        )

    def mean_curve(name: str) -> list[float]:
        curves = [getattr(curve, name) for curve in ranked]
        padded = np.stack([np.pad(c, (0, steps + 1 - len(c)), mode="edge") for c in curves])
        return [float(value) for value in padded.mean(axis=0)]

    return RankingFigures(
        baseline,
        ranking,
        len(ranked),
        float(np.mean([curve.steps for curve in ranked])),
        mean_curve("deletion"),
        mean_curve("insertion"),
        mean_with_interval([curve.deletion_area for curve in ranked]),
        mean_with_interval([curve.insertion_area for curve in ranked]),
        mean_with_interval([curve.drop for curve in ranked]),
        float(np.mean([curve.class_kept for curve in ranked])),
        float(np.mean([curve.evidence_share for curve in ranked])),
        advantage,
    )


@dataclass(frozen=True)
class StabilityFigures:
    """The stability of cells under one change of the images.

    Attributes:
        change: its name.
        same_cell, within_one_cell: mean shares of slots, see `SlotStability`.
        same_class: share of images whose predicted class stayed.
    """

    change: str
    same_cell: Mean
    within_one_cell: Mean
    same_class: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their JSON keys."""
        return {
            "change": self.change,
            "same_cell": self.same_cell.to_dict(),
            "within_one_cell": self.within_one_cell.to_dict(),
            "same_class": self.same_class,
        }


def summarize_stability(stabilities: Sequence[dict[str, SlotStability]]) -> list[StabilityFigures]:
    """Return the figures of each change over N images, at least 1."""
    return [
        StabilityFigures(
            change,
            mean_with_interval([each[change].same_cell for each in stabilities]),
            mean_with_interval([each[change].within_one_cell for each in stabilities]),
            float(np.mean([each[change].same_class for each in stabilities])),
        )
        for change in stabilities[0]
    ]
