"""Summaries of samples with confidence intervals, and the exact upper bound of a rate (Clopper and Pearson).

Medians and means have intervals by the percentile bootstrap. The bounds are our own few lines on numpy, because scipy,
which has them too, is not among the packages that a deployment machine installs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
_SEED = 0
# values drawn at a time, so that the memory of resampling a large sample is bounded
_MAX_DRAWN = 1 << 21
# halvings of [0, 1]: beyond what a float64 tells apart
_HALVINGS = 60


@dataclass(frozen=True)
class Median:
    """A median and its 95 % confidence interval."""

    value: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Mean:
    """A mean, its 95 % confidence interval, and the number of values."""

    value: float
    interval: tuple[float, float]
    count: int

    def to_dict(self) -> dict[str, Any]:
        """Return mean, low, high and count, for JSON."""
        return {"mean": self.value, "low": self.interval[0], "high": self.interval[1], "count": self.count}


def percentile(sample: ArrayLike, percent: float) -> float:
    """Return the value that `percent` (0 ... 100) of the sample do not exceed.

    Between two neighbours of the sorted sample it interpolates linearly (numpy's `linear`): for 1, 2, ..., 100 the 90th
    percentile is 90.1.

    Raises:
        ValueError: the sample is empty.
    """
    values = _check_sample(sample)
    return float(np.percentile(values, percent, method="linear"))


def mean(sample: ArrayLike) -> float:
    """Return the arithmetic mean; raise ValueError for an empty sample."""
    return float(_check_sample(sample).mean())


def spread(repeats: ArrayLike) -> float:
    """Return (largest - smallest) / median of the repeats; raise ValueError if there are none."""
    values = _check_sample(repeats)
    return float((values.max() - values.min()) / abs(np.median(values)))


def median(sample: ArrayLike, *, confidence: float = 0.95, resamples: int = RESAMPLES) -> Median:
    """Return the median with its interval by the percentile bootstrap.

    The sample is drawn again with replacement `resamples` times, from a generator with a fixed seed, so that the same
    sample always has the same interval; the interval holds the middle `confidence` of those medians. The members must
    be independent: neighbours that drift together make the interval too narrow.

    Raises:
        ValueError: the sample is empty.
    """
    values = _check_sample(sample)
    drawn = np.random.default_rng(_SEED).integers(0, len(values), (resamples, len(values)))
    medians = np.median(values[drawn], axis=1)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(medians, (tail, 100 - tail))
    return Median(float(np.median(values)), (float(low), float(high)))


def mean_with_interval(sample: ArrayLike, *, confidence: float = 0.95, resamples: int = RESAMPLES) -> Mean:
    """Return the mean with its interval by the percentile bootstrap, drawn as in `median`.

    Raises:
        ValueError: the sample is empty.
    """
    values = _check_sample(sample)
    generator = np.random.default_rng(_SEED)
    step = max(_MAX_DRAWN // len(values), 1)
    means = np.concatenate(
        [
            values[generator.integers(0, len(values), (min(step, resamples - first), len(values)))].mean(axis=1)
            for first in range(0, resamples, step)
        ]
    )
    tail = 50 * (1 - confidence)
    low, high = np.percentile(means, (tail, 100 - tail))
    return Mean(float(values.mean()), (float(low), float(high)), len(values))


def paired_ratios(candidate: Sequence[float], reference: Sequence[float]) -> NDArray[np.float64]:
    """Return candidate / reference, pair by pair: what changes between pairs cancels out.

    Raises:
        ValueError: the lengths differ.
    """
    if len(candidate) != len(reference):
        raise ValueError(f"{len(candidate)} and {len(reference)} values are no pairs")
    ratios: NDArray[np.float64] = np.asarray(candidate, np.float64) / np.asarray(reference, np.float64)
    return ratios


def _check_sample(sample: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(sample, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"a sample of shape {values.shape}; expected at least one value in a row")
    return values


def clopper_pearson_bound(cases: int, trials: int, confidence: float = 0.95) -> float:
    """Return Clopper and Pearson's one-sided upper bound of a rate.

    It is the largest rate under which `cases` or fewer in `trials` still happen with probability 1 - `confidence`:
    whatever the true rate, the bound exceeds it in at least `confidence` of all samples of independent trials. Without
    a case it is 1 - (1 - confidence)^(1 / trials).

    Args:
        cases: 0 ... trials.
        trials: 0 or more; without trials the bound is 1.
        confidence: between 0 and 1.

    Raises:
        ValueError: more cases than trials, or a confidence outside (0, 1).
    """
    if not 0 <= cases <= trials or not 0.0 < confidence < 1.0:
        raise ValueError(f"{cases} cases in {trials} trials at confidence {confidence}")
    if cases == trials:
        return 1.0
    counts = np.arange(1, cases + 1, dtype=np.float64)
    # logarithms of the binomial coefficients (trials over 0 ... cases)
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
    """Return Clopper and Pearson's lower and upper bound of a share, each one-sided at `confidence`.

    Args:
        hits: 0 ... trials.
        trials: 0 or more; without trials the bounds are 0 and 1.
        confidence: between 0 and 1.

    Raises:
        ValueError: see `clopper_pearson_bound`.
    """
    return (
        1.0 - clopper_pearson_bound(trials - hits, trials, confidence),
        clopper_pearson_bound(hits, trials, confidence),
    )


def trials_needed(rate: float, confidence: float = 0.95) -> int:
    """Return how many trials without a single case put the upper bound at `rate` or under it.

    Args:
        rate: between 0 and 1.
        confidence: between 0 and 1.
    """
    # rounded, so that a count that fits exactly is not one more by rounding
    return math.ceil(round(math.log(1.0 - confidence) / math.log1p(-rate), 9))
