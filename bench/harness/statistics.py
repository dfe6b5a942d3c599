"""What repeated measurements come to: percentiles, spread between repeats, medians with an interval, paired ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
_SEED = 0


@dataclass(frozen=True)
class Median:
    """A median and its 95 % confidence interval."""

    value: float
    interval: tuple[float, float]


def percentile(sample: ArrayLike, percent: float) -> float:
    """The value that `percent` of the sample do not exceed, 0 ... 100.

    Between two neighbours of the sorted sample it interpolates linearly (numpy's `linear`): of 1, 2, ..., 100 the 90th
    percentile is 90.1.

    Raises:
        ValueError: the sample is empty.
    """
    values = _filled(sample)
    return float(np.percentile(values, percent, method="linear"))


def mean(sample: ArrayLike) -> float:
    """The arithmetic mean. Raises ValueError: the sample is empty."""
    return float(_filled(sample).mean())


def spread(repeats: ArrayLike) -> float:
    """(largest - smallest) / median of the repeats. Raises ValueError: there are none."""
    values = _filled(repeats)
    return float((values.max() - values.min()) / abs(np.median(values)))


def median(sample: ArrayLike, *, confidence: float = 0.95, resamples: int = RESAMPLES) -> Median:
    """The median with its interval by the percentile bootstrap.

    The sample is drawn again with replacement `resamples` times, from a generator with a fixed seed, so that the same
    sample always has the same interval; the interval holds the middle `confidence` of those medians. It takes the
    sample's members to be independent: neighbours that drift together make it too narrow.

    Raises:
        ValueError: the sample is empty.
    """
    values = _filled(sample)
    drawn = np.random.default_rng(_SEED).integers(0, len(values), (resamples, len(values)))
    medians = np.median(values[drawn], axis=1)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(medians, (tail, 100 - tail))
    return Median(float(np.median(values)), (float(low), float(high)))


def paired_ratios(candidate: Sequence[float], reference: Sequence[float]) -> NDArray[np.float64]:
    """candidate / reference, pair by pair: what changed between pairs drops out.

    Raises:
        ValueError: they are not of one length.
    """
    if len(candidate) != len(reference):
        raise ValueError(f"{len(candidate)} and {len(reference)} figures are no pairs")
    ratios: NDArray[np.float64] = np.asarray(candidate, np.float64) / np.asarray(reference, np.float64)
    return ratios


def _filled(sample: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(sample, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"a sample of shape {values.shape}; expected at least one value in a row")
    return values
