"""Statistics of measurements: bootstrap intervals, bounds of rates, and the risk of a classifier that abstains.

Medians and means have 95 % intervals by the percentile bootstrap, and rates the bounds of Clopper and Pearson: a few
lines each, because `verify`, `--min-margin 5%` and the quick demo run where SciPy is not installed.

A classifier abstains where its margin is below a threshold. Coverage is the share of images that it answers, risk the
share of wrong predictions among these. Images with equal margins are answered together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
# values drawn at a time: bounds the memory of resampling a large sample
_MAX_DRAWN = 1 << 21
# error rates whose coverage a risk summary states, and its number of thresholds
_SUMMARY_ERROR_RATES, _NUM_LEVELS = (0.01, 0.02, 0.05), 10


@dataclass(frozen=True)
class Mean:
    """A mean or a median, its 95 % confidence interval, and the number of values."""

    value: float
    interval: tuple[float, float]
    count: int

    def to_dict(self) -> dict[str, Any]:
        """Return mean, low, high and count, for JSON."""
        return {"mean": self.value, "low": self.interval[0], "high": self.interval[1], "count": self.count}


def median(sample: ArrayLike) -> Mean:
    """Return the median with its interval; ValueError for an empty sample."""
    return _bootstrap(sample, np.median)


def mean_with_interval(sample: ArrayLike) -> Mean:
    """Return the mean with its interval; ValueError for an empty sample."""
    return _bootstrap(sample, np.mean)


def _bootstrap(sample: ArrayLike, statistic: Callable[..., Any]) -> Mean:
    """Return a statistic of independent values with its percentile interval, from a generator with a fixed seed."""
    values = np.asarray(sample, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"sample of shape {values.shape}; expected at least one value in one dimension")
    generator, step = np.random.default_rng(0), max(_MAX_DRAWN // len(values), 1)
    counts = [min(step, RESAMPLES - first) for first in range(0, RESAMPLES, step)]
    drawn = [statistic(generator.choice(values, (count, len(values))), axis=1) for count in counts]
    low, high = np.percentile(np.concatenate(drawn), (2.5, 97.5))
    return Mean(float(statistic(values)), (float(low), float(high)), len(values))


def spread(repeats: ArrayLike) -> float:
    """Return (largest - smallest) / median of the repeats; ValueError if there are none."""
    values = np.asarray(repeats, np.float64)
    return float(np.ptp(values) / abs(np.median(values)))


def paired_ratios(candidate: Sequence[float], reference: Sequence[float]) -> NDArray[np.float64]:
    """Return candidate / reference per pair, so that drift between pairs cancels; ValueError if the lengths differ."""
    return np.array([new / old for new, old in zip(candidate, reference, strict=True)], np.float64)


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
    """A risk-coverage curve: every threshold that makes a difference, strictest first.

    Attributes:
        margins: float64 [T], distinct, falling.
        answered: int64 [T], number of images with at least that margin.
        wrong: int64 [T], number of those that are misclassified.
    """

    margins: NDArray[np.float64]
    answered: NDArray[np.int64]
    wrong: NDArray[np.int64]

    @property
    def images(self) -> int:
        """The number of images, N."""
        return int(self.answered[-1])

    @property
    def error(self) -> float:
        """The error rate if every image is answered."""
        return int(self.wrong[-1]) / self.images

    @property
    def aurc(self) -> float:
        """The area under the curve: the mean over k = 1 ... N of the risk of the k largest margins.

        Wrong answers are spread evenly over images with equal margins, so that the order of these does not matter.
        """
        k = np.arange(1, self.images + 1)
        wrong = np.interp(k, np.concatenate([[0], self.answered]), np.concatenate([[0], self.wrong]))
        return float((wrong / k).mean())

    def coverage_at(self, error: float) -> float:
        """Return the largest coverage whose risk on these images is at most `error`."""
        return int(self.answered[self.wrong <= error * self.answered].max(initial=0)) / self.images

    def summary(self) -> dict[str, Any]:
        """Return the figures that reports and model files hold and `choose_threshold` reads.

        `levels` has (margin, answered, wrong) of the strictest threshold for each tenth of coverage.
        """
        counts = -(-np.arange(1, _NUM_LEVELS + 1) * self.images // _NUM_LEVELS)
        chosen = np.unique(np.searchsorted(self.answered, counts))
        return {
            "images": self.images,
            "error": self.error,
            "aurc": self.aurc,
            "coverage_at_error": {f"{rate:g}": self.coverage_at(rate) for rate in _SUMMARY_ERROR_RATES},
            "levels": [[float(self.margins[i]), int(self.answered[i]), int(self.wrong[i])] for i in chosen],
        }


def compute_risk_curve(margins: ArrayLike, correct: ArrayLike) -> RiskCurve:
    """Return the curve of N labelled images, by their margins [N] and whether the prediction is the label, bool [N].

    Raises:
        ValueError: no images, arrays of different lengths, or a margin that is NaN or infinite.
    """
    sizes, right = np.asarray(margins, np.float64), np.asarray(correct, np.bool_)
    if sizes.ndim != 1 or sizes.shape != right.shape or not len(sizes) or not np.isfinite(sizes).all():
        raise ValueError(f"margins {sizes.shape}, answers {right.shape}; expected as many, finite, at least one")
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order]
    last = np.flatnonzero(np.append(falling[1:] != falling[:-1], True))
    return RiskCurve(falling[last], last + 1, np.cumsum(~right[order], dtype=np.int64)[last])


@dataclass(frozen=True)
class Threshold:
    """The margin below which a model should abstain to keep a target error rate.

    Attributes:
        target, confidence: the largest acceptable error rate, and the confidence of its bound, 0 ... 1.
        images: number of labelled images that the threshold was chosen on.
        min_margin: the threshold, or the smallest margin seen if all images may be answered; None if no threshold is
            known to reach the target.
        coverage, wrong, answered: share and counts of images at that threshold.
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
        """Return the fields for JSON; the reason instead of the figures if there is no threshold."""
        fields = asdict(self)
        head = {"target_error": fields.pop("target"), "upper_bound": fields.pop("bound"), **fields}
        absent = ("reason",) if self.min_margin is not None else ("upper_bound", "coverage", "wrong", "answered")
        return {name: value for name, value in head.items() if name not in absent}


def explain_too_few(images: int, target: float, confidence: float = 0.95) -> str:
    """Return why this many labelled images cannot support a target error rate; empty if they can."""
    # rounded first: an exact count must not grow by one through floating-point error
    needed = math.ceil(round(math.log(1.0 - confidence) / math.log1p(-target), 9))
    return "" if images >= needed else (
        f"{images} labelled images cannot show an error rate of at most {100 * target:g} % with {confidence:.0%} "
        f"confidence: even without errors, {needed} are needed"
    )  # fmt: skip


def choose_threshold(summary: Mapping[str, Any], target: float, confidence: float = 0.95) -> Threshold:
    """Choose the lowest threshold in `RiskCurve.summary` whose error rate is at most `target` with `confidence`.

    The upper bound, not the observed share, has to be at most the target. Thresholds are tried from the strictest that
    answers enough images, until one fails (fixed-sequence testing), so that the confidence holds for the choice among
    them too.
    """
    images = summary["images"]
    chosen = Threshold(target, confidence, images, reason=explain_too_few(images, target, confidence))
    for margin, answered, wrong in () if chosen.reason else summary["levels"]:
        if explain_too_few(answered, target, confidence):
            continue
        bound = clopper_pearson_bound(wrong, answered, confidence)
        if bound > target:
            reason = (
                f"{wrong} of the {answered} images with the largest margins are wrong: their error rate may be as high "
                f"as {100 * bound:.2g} %, above {100 * target:g} %"
            )
            return chosen if chosen.answered else Threshold(target, confidence, images, reason=reason)
        chosen = Threshold(target, confidence, images, margin, answered / images, wrong, answered, bound)
    return chosen


def smallest_target(summary: Mapping[str, Any], confidence: float = 0.95) -> float | None:
    """Return the smallest error rate, in tenths of a percent, for which `choose_threshold` finds one; None for none."""
    # a target has a threshold if the bound of the first one tried is below it: the rate is one of these bounds
    bounds = sorted(clopper_pearson_bound(wrong, answered, confidence) for _, answered, wrong in summary["levels"])
    targets = (math.ceil(1000 * bound) / 1000 for bound in bounds)
    return next(
        (t for t in targets if t < 1 and choose_threshold(summary, t, confidence).min_margin is not None), None
    )  # fmt: skip
