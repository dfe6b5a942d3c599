"""Risk and coverage of a classifier that abstains where its margin is below a threshold.

Coverage is the share of images whose margin reaches the threshold, risk the share of wrong predictions among them.
Images of equal margin are accepted together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opal_deploy.statistics.intervals import clopper_pearson_bound, trials_needed

NUM_LEVELS = 10
"""The number of thresholds in a summary: those that accept at least 1/10, 2/10, ... of the images."""

SUMMARY_ERROR_RATES = (0.01, 0.02, 0.05)
"""The error rates whose coverage a summary states."""


@dataclass(frozen=True)
class Level:
    """One threshold: `answered` images have a margin of at least `margin`, and `wrong` of them are misclassified."""

    margin: float
    answered: int
    wrong: int


@dataclass(frozen=True)
class RiskCurve:
    """The risk-coverage curve: every threshold that makes a difference, the strictest first.

    Attributes:
        margins: float64 [T], distinct, falling.
        answered: int64 [T], images with at least that margin.
        wrong: int64 [T], how many of those are misclassified.
    """

    margins: NDArray[np.float64]
    answered: NDArray[np.int64]
    wrong: NDArray[np.int64]

    @property
    def images(self) -> int:
        """N, the number of images."""
        return int(self.answered[-1])

    @property
    def error(self) -> float:
        """The error rate where every image is accepted."""
        return int(self.wrong[-1]) / self.images

    @property
    def aurc(self) -> float:
        """The area under the risk-coverage curve: the mean over k = 1 ... N of the risk of the k largest margins.

        Among images of equal margin the wrong ones are spread evenly, so that their order does not matter.
        """
        k = np.arange(1, self.images + 1)
        wrong = np.interp(k, np.concatenate([[0], self.answered]), np.concatenate([[0], self.wrong]))
        return float((wrong / k).mean())

    def coverage_at(self, error: float) -> float:
        """Return the largest coverage of a threshold whose risk on these images is at most `error`."""
        fits = self.wrong <= error * self.answered
        return int(self.answered[fits].max()) / self.images if fits.any() else 0.0

    def levels(self) -> list[Level]:
        """Return for each tenth of coverage the strictest threshold that reaches it, without duplicates."""
        counts = -(-np.arange(1, NUM_LEVELS + 1) * self.images // NUM_LEVELS)
        chosen = np.unique(np.searchsorted(self.answered, counts))
        return [Level(float(self.margins[i]), int(self.answered[i]), int(self.wrong[i])) for i in chosen]

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON, checkpoints and model files; `choose_threshold` reads them."""
        return {
            "images": self.images,
            "error": self.error,
            "aurc": self.aurc,
            "coverage_at_error": {f"{rate:g}": self.coverage_at(rate) for rate in SUMMARY_ERROR_RATES},
            "levels": [[level.margin, level.answered, level.wrong] for level in self.levels()],
        }


def compute_risk_curve(margins: ArrayLike, correct: ArrayLike) -> RiskCurve:
    """Compute the curve of N labelled images.

    Args:
        margins: [N], cosine of the predicted class minus that of the runner-up.
        correct: bool [N], whether the prediction is the label.

    Raises:
        ValueError: no images, arrays of different lengths, or a margin that is NaN or infinite.
    """
    sizes, right = np.asarray(margins, np.float64), np.asarray(correct, np.bool_)
    if sizes.ndim != 1 or sizes.shape != right.shape or not len(sizes) or not np.isfinite(sizes).all():
        raise ValueError(f"margins {sizes.shape} and answers {right.shape}; expected as many, finite, at least one")
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order]
    last = np.flatnonzero(np.append(falling[1:] != falling[:-1], True))
    wrong = np.cumsum(~right[order], dtype=np.int64)[last]
    return RiskCurve(falling[last], (last + 1).astype(np.int64), wrong)


@dataclass(frozen=True)
class Threshold:
    """A margin under which a model should abstain, for a target error rate.

    Attributes:
        target: the error rate to stay under, 0 ... 1.
        confidence: of the bound.
        images: the number of labelled images that the threshold was chosen on.
        min_margin: the threshold; None where none is known to reach the target. Where all images may be accepted, it
            is the smallest margin seen.
        coverage: share of the images accepted.
        wrong, answered: counts at that threshold.
        bound: Clopper and Pearson's upper bound of the error rate at that threshold.
        reason: why there is no threshold; empty if there is one.
    """

    target: float
    confidence: float
    images: int
    min_margin: float | None = None
    coverage: float = 0.0
    wrong: int = 0
    answered: int = 0
    bound: float = 1.0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; without a threshold, the reason instead of its figures."""
        head = {"target_error": self.target, "confidence": self.confidence, "images": self.images}
        if self.min_margin is None:
            return {**head, "min_margin": None, "reason": self.reason}
        return {
            **head,
            "min_margin": self.min_margin,
            "coverage": self.coverage,
            "answered": self.answered,
            "wrong": self.wrong,
            "upper_bound": self.bound,
        }


def explain_too_few(images: int, target: float, confidence: float = 0.95) -> str:
    """Return why so few labelled images cannot support a target, whatever the model; empty if they can."""
    needed = trials_needed(target, confidence)
    if images >= needed:
        return ""
    return (
        f"{images} labelled images cannot show an error rate of at most {100 * target:g} % with {confidence:.0%} "
        f"confidence: even without a wrong answer {needed} are needed"
    )


def choose_threshold(summary: Mapping[str, Any], target: float, confidence: float = 0.95) -> Threshold:
    """Choose the lowest threshold whose error rate is at most `target`, with `confidence`.

    A threshold with few errors on these images may have been lucky, and the luckiest of many even more so. So the upper
    bound, not the observed share, has to be under the target; and the thresholds are tried from the strictest on,
    beginning with the first that accepts enough images for the bound to be reached at all, until one fails
    (fixed-sequence testing): the confidence then holds for the choice too, not for each threshold alone.

    Args:
        summary: of a `RiskCurve`.
        target: error rate, between 0 and 1.
        confidence: of the bound.

    Raises:
        ValueError: not the summary of a risk-coverage curve.
    """
    images, levels = _levels(summary)
    reason = explain_too_few(images, target, confidence)
    if reason:
        return Threshold(target, confidence, images, reason=reason)
    needed, chosen = trials_needed(target, confidence), Threshold(target, confidence, images)
    for level in (level for level in levels if level.answered >= needed):
        bound = clopper_pearson_bound(level.wrong, level.answered, confidence)
        if bound > target:
            if chosen.min_margin is None:
                reason = (
                    f"of the {level.answered} images of largest margin {level.wrong} are wrong: their error rate may "
                    f"be up to {100 * bound:.2g} %, which is over {100 * target:g} %"
                )
                return Threshold(target, confidence, images, reason=reason)
            break
        share = level.answered / images
        chosen = Threshold(target, confidence, images, level.margin, share, level.wrong, level.answered, bound)
    return chosen


def smallest_target(summary: Mapping[str, Any], confidence: float = 0.95) -> float | None:
    """Return the smallest error rate, in tenths of a percent, that `choose_threshold` finds a threshold for.

    Args:
        summary: of a `RiskCurve`.
        confidence: of the bound.

    Returns:
        A rate below 1; None if there is none.

    Raises:
        ValueError: not the summary of a risk-coverage curve.
    """
    # a threshold is found if the bound of the first one tried is under the target: the rate is one of these bounds
    bounds = {clopper_pearson_bound(level.wrong, level.answered, confidence) for level in _levels(summary)[1]}
    for bound in sorted(bounds):
        target = math.ceil(1000 * bound) / 1000
        if target < 1 and choose_threshold(summary, target, confidence).min_margin is not None:
            return target
    return None


def _levels(summary: Mapping[str, Any]) -> tuple[int, list[Level]]:
    try:
        levels = [Level(float(margin), int(answered), int(wrong)) for margin, answered, wrong in summary["levels"]]
        images = int(summary["images"])
    except (KeyError, TypeError, ValueError):
        levels, images = [], 0
    whole = bool(levels) and levels[-1].answered == images
    if not whole or not all(math.isfinite(v.margin) and 0 <= v.wrong <= v.answered for v in levels):
        raise ValueError("not the summary of a risk-coverage curve")
    return images, levels
