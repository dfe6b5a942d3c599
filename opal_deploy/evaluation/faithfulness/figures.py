"""Figures with confidence intervals from the curves of single images, each control paired image by image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opal_deploy.evaluation.faithfulness.perturbation import Baseline, Curve, Curves
from opal_deploy.evaluation.faithfulness.rankings import CONTRIBUTION, RANKINGS, REVERSE
from opal_deploy.evaluation.faithfulness.stability import SlotStability
from opal_deploy.statistics.intervals import Mean, mean_with_interval


@dataclass(frozen=True)
class Advantage:
    """By how much the evidence, ranked by contribution, beats another ranking: paired, positive where it does.

    Where an image has fewer cells for the other order, the evidence counts with its first so many cells only.

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
        fill, order: which.
        images: how many images.
        cells: mean number of cells that were removed.
        deletion, insertion: mean cosine after 0, 1, ..., m steps; an image with fewer cells stays where it then is.
        deletion_area, insertion_area, drop: see `Path`.
        kept: share of images that are still answered with the class when all its cells are removed.
        overlap: mean share of the cells that are evidence.
        better: None for the evidence itself.
    """

    fill: Baseline
    order: str
    images: int
    cells: float
    deletion: list[float]
    insertion: list[float]
    deletion_area: Mean
    insertion_area: Mean
    drop: Mean
    kept: float
    overlap: float
    better: Advantage | None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their JSON keys."""
        document: dict[str, Any] = {
            "fill": self.fill,
            "order": self.order,
            "images": self.images,
            "cells": self.cells,
            "deletion": self.deletion,
            "insertion": self.insertion,
            "deletion_area": self.deletion_area.to_dict(),
            "insertion_area": self.insertion_area.to_dict(),
            "drop": self.drop.to_dict(),
            "class_kept": self.kept,
            "cells_that_are_evidence": self.overlap,
        }
        if self.better is not None:
            drop = self.better.drop
            document["evidence_better_by"] = {
                "deletion_area": self.better.deletion.to_dict(),
                "insertion_area": self.better.insertion.to_dict(),
                "drop": None if drop is None else drop.to_dict(),
            }
        return document


def summarize_rankings(paths: Sequence[Curves], fills: Sequence[Baseline], steps: int) -> list[RankingFigures]:
    """Return the figures by baseline, then in the order of `RANKINGS`; a ranking that no image has is left out.

    Args:
        paths: of N images, at least 1.
        fills: that were used.
        steps: m.
    """
    found = []
    for fill in fills:
        for order in RANKINGS:
            both = [
                (other, each[fill, CONTRIBUTION].first(other.steps))
                for each in paths
                if (other := each.get((fill, order))) is not None
            ]
            if both:
                found.append(_summarize(fill, order, both, steps))
    return found


def _summarize(fill: Baseline, order: str, both: list[tuple[Curve, Curve]], steps: int) -> RankingFigures:
    mine = [path for path, _ in both]
    better = None
    if order != CONTRIBUTION:
        better = Advantage(
            mean_with_interval([other.deletion_area - ours.deletion_area for other, ours in both]),
            mean_with_interval([ours.insertion_area - other.insertion_area for other, ours in both]),
            None if order == REVERSE else mean_with_interval([ours.drop - other.drop for other, ours in both]),
        )

    def curve(name: str) -> list[float]:
        curves = [getattr(path, name) for path in mine]
        held = np.stack([np.pad(c, (0, steps + 1 - len(c)), mode="edge") for c in curves])
        return [float(value) for value in held.mean(axis=0)]

    return RankingFigures(
        fill,
        order,
        len(mine),
        float(np.mean([path.steps for path in mine])),
        curve("deletion"),
        curve("insertion"),
        mean_with_interval([path.deletion_area for path in mine]),
        mean_with_interval([path.insertion_area for path in mine]),
        mean_with_interval([path.drop for path in mine]),
        float(np.mean([path.kept for path in mine])),
        float(np.mean([path.overlap for path in mine])),
        better,
    )


@dataclass(frozen=True)
class StabilityFigures:
    """The stability of cells under one change of the images.

    Attributes:
        change: which.
        exactly, nearly: mean shares of slots, see `Kept`.
        answer: share of images whose answer stayed.
    """

    change: str
    exactly: Mean
    nearly: Mean
    answer: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their JSON keys."""
        return {
            "change": self.change,
            "same_cell": self.exactly.to_dict(),
            "within_one_cell": self.nearly.to_dict(),
            "same_class": self.answer,
        }


def summarize_stability(kept: Sequence[dict[str, SlotStability]]) -> list[StabilityFigures]:
    """Return the figures of each change over N images, at least 1."""
    return [
        StabilityFigures(
            change,
            mean_with_interval([each[change].exactly for each in kept]),
            mean_with_interval([each[change].nearly for each in kept]),
            float(np.mean([each[change].answer for each in kept])),
        )
        for change in kept[0]
    ]
