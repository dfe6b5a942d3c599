"""Statistics of measurements: confidence intervals, bounds of rates, and the risk of a classifier that abstains.

Medians and means have intervals by the percentile bootstrap. The bounds are Clopper and Pearson's, in a few lines of
numpy: scipy has them too, but deployment machines do not install it.

A classifier abstains where its margin is below a threshold. Coverage is the share of images that it answers, risk the
share of wrong predictions among these. Images with equal margins are answered together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
_SEED = 0
# values drawn at a time: bounds the memory of resampling a large sample
_MAX_DRAWN = 1 << 21
# halvings of [0, 1]: beyond float64's resolution
_HALVINGS = 60

# thresholds in a risk summary: those that answer at least 1/10, 2/10, ... of the images
_NUM_LEVELS = 10
# error rates whose coverage a risk summary states
_SUMMARY_ERROR_RATES = (0.01, 0.02, 0.05)


@dataclass(frozen=True)
class Median:
    """A median and its confidence interval."""

    value: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Mean:
    """A mean, its confidence interval, and the number of values."""

    value: float
    interval: tuple[float, float]
    count: int

    def to_dict(self) -> dict[str, Any]:
        """Return mean, low, high and count, for JSON."""
        return {"mean": self.value, "low": self.interval[0], "high": self.interval[1], "count": self.count}


def percentile(sample: ArrayLike, percent: float) -> float:
    """Return the percentile of a sample (`percent` is 0 ... 100), interpolated linearly.

    Raises:
        ValueError: the sample is empty.
    """
    values = _check_sample(sample)
    return float(np.percentile(values, percent, method="linear"))


def mean(sample: ArrayLike) -> float:
    """Return the arithmetic mean; raises ValueError for an empty sample."""
    return float(_check_sample(sample).mean())


def spread(repeats: ArrayLike) -> float:
    """Return (largest - smallest) / median of the repeats; raises ValueError if there are none."""
    values = _check_sample(repeats)
    return float((values.max() - values.min()) / abs(np.median(values)))


def median(sample: ArrayLike, *, confidence: float = 0.95, resamples: int = RESAMPLES) -> Median:
    """Return the median with its interval by the percentile bootstrap.

    The generator has a fixed seed: the same sample always has the same interval. Members must be independent;
    neighbours that drift together make the interval too narrow.

    Raises:
        ValueError: the sample is empty.
    """
    values = _check_sample(sample)
    drawn = np.random.default_rng(_SEED).integers(0, len(values), (resamples, len(values)))
    medians = np.median(values[drawn], axis=1)
    return Median(float(np.median(values)), _middle(medians, confidence))


def mean_with_interval(sample: ArrayLike, *, confidence: float = 0.95, resamples: int = RESAMPLES) -> Mean:
    """Return the mean with its interval by the percentile bootstrap, from a generator with a fixed seed.

    Raises:
        ValueError: the sample is empty.
    """
    values = _check_sample(sample)
    generator = np.random.default_rng(_SEED)
    step = max(_MAX_DRAWN // len(values), 1)
    counts = [min(step, resamples - first) for first in range(0, resamples, step)]
    drawn = (generator.integers(0, len(values), (count, len(values))) for count in counts)
    means = np.concatenate([values[indices].mean(axis=1) for indices in drawn])
    return Mean(float(values.mean()), _middle(means, confidence), len(values))


def _middle(estimates: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    tail = 50 * (1 - confidence)
    low, high = np.percentile(estimates, (tail, 100 - tail))
    return float(low), float(high)


def paired_ratios(candidate: Sequence[float], reference: Sequence[float]) -> NDArray[np.float64]:
    """Return candidate / reference per pair, so that drift between pairs cancels; ValueError if the lengths differ."""
    if len(candidate) != len(reference):
        raise ValueError(f"{len(candidate)} and {len(reference)} values; expected pairs")
    ratios: NDArray[np.float64] = np.asarray(candidate, np.float64) / np.asarray(reference, np.float64)
    return ratios


def _check_sample(sample: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(sample, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"sample of shape {values.shape}; expected at least one value in one dimension")
    return values


def clopper_pearson_bound(cases: int, trials: int, confidence: float = 0.95) -> float:
    """Return Clopper and Pearson's one-sided upper bound of a rate.

    Whatever the true rate, the bound exceeds it in at least `confidence` of all samples of independent trials.

    Without trials the bound is 1.

    Raises:
        ValueError: more cases than trials, or a confidence outside (0, 1).
    """
    if not 0 <= cases <= trials or not 0.0 < confidence < 1.0:
        raise ValueError(f"{cases} cases in {trials} trials at confidence {confidence}")
    if cases == trials:
        return 1.0
    counts = np.arange(1, cases + 1, dtype=np.float64)
    # logarithms of the binomial coefficients of `trials` over 0 ... `cases`
    ways = np.concatenate([[0.0], np.cumsum(np.log((trials - counts + 1) / counts))])
    k = np.arange(cases + 1)
    low, high = cases / trials, 1.0
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        if not low < rate < high:
            break
        at_most = float(np.exp(ways + k * math.log(rate) + (trials - k) * math.log1p(-rate)).sum())
        low, high = (rate, high) if at_most > 1.0 - confidence else (low, rate)
    return high


def share_bounds(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Clopper and Pearson's lower and upper bound of `hits` in `trials`, each one-sided at `confidence`.

    Raises:
        ValueError: see `clopper_pearson_bound`.
    """
    low = 1.0 - clopper_pearson_bound(trials - hits, trials, confidence)
    return low, clopper_pearson_bound(hits, trials, confidence)


def trials_needed(rate: float, confidence: float = 0.95) -> int:
    """Return the number of trials without a case whose upper bound is at most `rate`; both arguments in (0, 1)."""
    # rounded first: an exact count must not grow by one through floating-point error
    return math.ceil(round(math.log(1.0 - confidence) / math.log1p(-rate), 9))


@dataclass(frozen=True)
class Level:
    """One threshold: `answered` images have at least this margin; `wrong` of them are misclassified."""

    margin: float
    answered: int
    wrong: int


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
        fits = self.wrong <= error * self.answered
        return int(self.answered[fits].max()) / self.images if fits.any() else 0.0

    def levels(self) -> list[Level]:
        """Return the strictest threshold for each tenth of coverage, without duplicates."""
        counts = -(-np.arange(1, _NUM_LEVELS + 1) * self.images // _NUM_LEVELS)
        chosen = np.unique(np.searchsorted(self.answered, counts))
        return [Level(float(self.margins[i]), int(self.answered[i]), int(self.wrong[i])) for i in chosen]

    def summary(self) -> dict[str, Any]:
        """Return the figures that reports and model files hold and `choose_threshold` reads."""
        return {
            "images": self.images,
            "error": self.error,
            "aurc": self.aurc,
            "coverage_at_error": {f"{rate:g}": self.coverage_at(rate) for rate in _SUMMARY_ERROR_RATES},
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
        raise ValueError(
            f"margins of shape {sizes.shape}, answers of shape {right.shape}; expected equal lengths, finite values "
            "and at least one image"
        )
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order]
    last = np.flatnonzero(np.append(falling[1:] != falling[:-1], True))
    wrong = np.cumsum(~right[order], dtype=np.int64)[last]
    return RiskCurve(falling[last], (last + 1).astype(np.int64), wrong)


@dataclass(frozen=True)
class Threshold:
    """The margin below which a model should abstain to keep a target error rate.

    Attributes:
        target: the largest acceptable error rate, 0 ... 1.
        confidence: confidence of the bound.
        images: number of labelled images that the threshold was chosen on.
        min_margin: the threshold, or the smallest margin seen if all images may be answered; None if no threshold is
            known to reach the target.
        coverage: share of images answered.
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
        """Return the fields for JSON; the reason instead of the figures if there is no threshold."""
        head = {"target_error": self.target, "confidence": self.confidence, "images": self.images}
        if self.min_margin is None:
            return {**head, "min_margin": None, "reason": self.reason}
        figures = {name: getattr(self, name) for name in ("min_margin", "coverage", "answered", "wrong")}
        return {**head, **figures, "upper_bound": self.bound}


def explain_too_few(images: int, target: float, confidence: float = 0.95) -> str:
    """Return why this many labelled images cannot support a target error rate; empty if they can."""
    needed = trials_needed(target, confidence)
    if images >= needed:
        return ""
    return (
        f"{images} labelled images cannot show an error rate of at most {100 * target:g} % with {confidence:.0%} "
        f"confidence: even without errors, {needed} are needed"
    )


def choose_threshold(summary: Mapping[str, Any], target: float, confidence: float = 0.95) -> Threshold:
    """Choose the lowest threshold whose error rate is at most `target` with `confidence`.

    The upper bound, not the observed share, has to be at most the target. Thresholds are tried from the strictest that
    answers enough images, until one fails (fixed-sequence testing), so that the confidence holds for the choice among
    them too.

    Args:
        summary: from `RiskCurve.summary`.
        target: error rate, between 0 and 1.
        confidence: confidence of the bound.
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
                    f"{level.wrong} of the {level.answered} images with the largest margins are wrong: their error "
                    f"rate may be as high as {100 * bound:.2g} %, above {100 * target:g} %"
                )
                return Threshold(target, confidence, images, reason=reason)
            break
        share = level.answered / images
        chosen = Threshold(target, confidence, images, level.margin, share, level.wrong, level.answered, bound)
    return chosen


def smallest_target(summary: Mapping[str, Any], confidence: float = 0.95) -> float | None:
    """Return the smallest error rate, in tenths of a percent, that has a threshold; None if no rate below 1 has one.

    Arguments are those of `choose_threshold`.
    """
    # a target has a threshold if the bound of the first one tried is below it: the rate is one of these bounds
    bounds = {clopper_pearson_bound(level.wrong, level.answered, confidence) for level in _levels(summary)[1]}
    for bound in sorted(bounds):
        target = math.ceil(1000 * bound) / 1000
        if target < 1 and choose_threshold(summary, target, confidence).min_margin is not None:
            return target
    return None


def _levels(summary: Mapping[str, Any]) -> tuple[int, list[Level]]:
    return summary["images"], [Level(*level) for level in summary["levels"]]
