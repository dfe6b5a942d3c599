"""Bounds of rates, and the risk of a classifier that abstains: what runs where SciPy is not installed.

A classifier abstains where its margin is below a threshold. Coverage is the share of images that it answers, risk the
share of wrong predictions among these. Images with equal margins are answered together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# thresholds in a summary: those that answer at least 1/10, 2/10, ... of the images
_NUM_LEVELS = 10
# error rates whose coverage a summary states
_ERROR_RATES = (0.01, 0.02, 0.05)
CONFIDENCE = 0.95


def clopper_pearson_bound(cases: int, trials: int, confidence: float = 0.95) -> float:
    """Return Clopper and Pearson's one-sided upper bound of a rate; 1 without trials.

    Whatever the true rate, the bound exceeds it in at least `confidence` of all samples of independent trials.
    """
    if not 0 <= cases <= trials or not 0.0 < confidence < 1.0:
        raise ValueError(f"{cases} cases in {trials} trials at confidence {confidence}")
    k = np.arange(cases + 1)
    # logarithms of the binomial coefficients
    ways = np.concatenate([[0.0], np.cumsum(np.log((trials - k[1:] + 1) / k[1:]))])
    low, high = cases / max(trials, 1), 1.0
    # halvings of [0, 1], until float64's resolution
    while cases < trials and low < (rate := (low + high) / 2) < high:
        at_most = float(np.exp(ways + k * math.log(rate) + (trials - k) * math.log1p(-rate)).sum())
        low, high = (rate, high) if at_most > 1.0 - confidence else (low, rate)
    return high


def share_bounds(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Clopper and Pearson's lower and upper bound of `hits` in `trials`, each one-sided at `confidence`."""
    low = 1.0 - clopper_pearson_bound(trials - hits, trials, confidence)
    return low, clopper_pearson_bound(hits, trials, confidence)


@dataclass(frozen=True)
class RiskCurve:
    """A risk-coverage curve: every threshold that makes a difference, strictest first."""

    margins: NDArray[np.float64]  # float64 [T], distinct, falling
    answered: NDArray[np.int64]  # int64 [T], number of images with at least that margin
    wrong: NDArray[np.int64]  # int64 [T], number of those that are misclassified

    @property
    def images(self) -> int:
        """The number of images, N."""
        return int(self.answered[-1])

    def summary(self) -> dict[str, Any]:
        """Return the figures that reports and model files hold and `choose_threshold` reads.

        `aurc`, the area under the curve, is the mean over k = 1 ... N of the risk of the k largest margins. Wrong
        answers are spread evenly over images with equal margins. `levels` are margin, answered and wrong of the
        strictest threshold for each tenth of coverage.
        """
        k = np.arange(1, self.images + 1)
        wrong = np.interp(k, np.append(0, self.answered), np.append(0, self.wrong))
        coverage = {}
        for rate in _ERROR_RATES:
            low_risk = self.answered[self.wrong <= rate * self.answered]
            coverage[f"{rate:g}"] = int(low_risk.max(initial=0)) / self.images
        counts = -(-np.arange(1, _NUM_LEVELS + 1) * self.images // _NUM_LEVELS)
        chosen = np.unique(np.searchsorted(self.answered, counts))
        columns = (values[chosen].tolist() for values in (self.margins, self.answered, self.wrong))
        return {
            "images": self.images,
            "error": int(self.wrong[-1]) / self.images,
            "aurc": float((wrong / k).mean()),
            "coverage_at_error": coverage,
            "levels": [list(level) for level in zip(*columns, strict=True)],
        }


def compute_risk_curve(margins: ArrayLike, correct: ArrayLike) -> RiskCurve:
    """Return the curve of N labelled images, at least one.

    Args:
        margins: [N], finite; cosine of the predicted class minus that of the runner-up.
        correct: bool [N], whether the prediction is the label.
    """
    sizes = np.asarray(margins, np.float64)
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order]
    last = np.flatnonzero(np.append(falling[1:] != falling[:-1], True))
    wrong = np.cumsum(~np.asarray(correct, np.bool_)[order], dtype=np.int64)[last]
    return RiskCurve(falling[last], (last + 1).astype(np.int64), wrong)


@dataclass(frozen=True)
class Threshold:
    """The margin below which a model should abstain to keep a target error rate."""

    target: float  # the largest acceptable error rate, 0 ... 1
    images: int  # number of labelled images that the threshold was chosen on
    min_margin: float | None = None  # the threshold; None if no threshold is known to reach the target
    coverage: float = 0.0  # share of images answered
    answered: int = 0  # answered, wrong: counts at that threshold
    wrong: int = 0
    bound: float = 1.0  # Clopper and Pearson's upper bound of the error rate at that threshold
    reason: str = ""  # why there is no threshold; empty if there is one

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; the reason instead of the figures if there is no threshold."""
        document = {"target_error": self.target, "confidence": CONFIDENCE, "images": self.images}
        if self.min_margin is None:
            return {**document, "min_margin": None, "reason": self.reason}
        figures = {name: getattr(self, name) for name in ("min_margin", "coverage", "answered", "wrong")}
        return {**document, **figures, "upper_bound": self.bound}


def explain_too_few(images: int, target: float) -> str:
    """Return why this many labelled images cannot support a target error rate; empty if they can."""
    needed = _images_needed(target)
    if images >= needed:
        return ""
    return (
        f"{images} labelled images cannot show an error rate of at most {100 * target:g} % with {CONFIDENCE:.0%} "
        f"confidence: even without errors, {needed} are needed"
    )


def _images_needed(target: float) -> int:
    """Return the number of images without an error whose upper bound is at most `target`."""
    # rounded first: an exact count must not grow by one through floating-point error
    return math.ceil(round(math.log(1 - CONFIDENCE) / math.log1p(-target), 9))


def choose_threshold(summary: Mapping[str, Any], target: float) -> Threshold:
    """Choose the lowest threshold whose error rate is at most `target`, between 0 and 1, with 95 % confidence.

    The upper bound, not the observed share, has to be at most the target. Thresholds are tried from the strictest that
    answers enough images, until one fails (fixed-sequence testing), so that the confidence holds for the choice among
    them too. `summary` is that of `RiskCurve.summary`.
    """
    images = summary["images"]
    if reason := explain_too_few(images, target):
        return Threshold(target, images, reason=reason)
    needed, chosen = _images_needed(target), Threshold(target, images)
    for margin, answered, wrong in summary["levels"]:
        if answered < needed:
            continue
        bound = clopper_pearson_bound(wrong, answered)
        if bound > target and chosen.min_margin is None:
            reason = (
                f"{wrong} of the {answered} images with the largest margins are wrong: their error rate may be as high "
                f"as {100 * bound:.2g} %, above {100 * target:g} %"
            )
            return Threshold(target, images, reason=reason)
        if bound > target:
            break
        chosen = Threshold(target, images, margin, answered / images, answered, wrong, bound)
    return chosen


def smallest_target(summary: Mapping[str, Any]) -> float | None:
    """Return the smallest error rate, in tenths of a percent, that has a threshold; None if no rate below 1 has one."""
    # a target has a threshold if the bound of the first one tried is below it: the rate is one of these bounds
    for bound in sorted({clopper_pearson_bound(wrong, answered) for _, answered, wrong in summary["levels"]}):
        target = math.ceil(1000 * bound) / 1000
        if target < 1 and choose_threshold(summary, target).min_margin is not None:
            return target
    return None
