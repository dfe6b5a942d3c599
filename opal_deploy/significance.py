"""Tests of whether two samples come from one distribution, in a few lines of numpy: servers do not install scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# terms of Kolmogorov's series: beyond float64's resolution wherever the sum is below 1
_TERMS = 100
# relative: probabilities that differ by rounding only are equal
_EQUAL = 1 + 1e-7


def kolmogorov_smirnov(distance: float, first: float, second: float) -> float:
    """Return the two-sided p-value of the largest difference of two samples' distribution functions.

    Asymptotic, with Stephens' correction for small samples (1970).

    Args:
        distance: 0 ... 1.
        first, second: sizes of the samples.
    """
    size = math.sqrt(first * second / (first + second))
    scaled = (size + 0.12 + 0.11 / size) * distance
    # the series converges slowly where its sum is 1
    if scaled < 0.2:
        return 1.0
    k = np.arange(1, _TERMS + 1)
    total = 2 * np.sum((-1.0) ** (k - 1) * np.exp(-2 * (k * scaled) ** 2))
    return float(np.clip(total, 0.0, 1.0))


def fisher_exact(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Return the two-sided p-value of Fisher's exact test for two shares.

    Args:
        first, second: (cases, trials) of the samples, 0 <= cases <= trials.
    """
    (cases, trials), (other_cases, other_trials) = first, second
    total = cases + other_cases
    smallest, largest = max(0, total - other_trials), min(total, trials)
    support = np.arange(smallest, largest + 1)
    logs = -_log_factorials(support) - _log_factorials(trials - support)
    logs -= _log_factorials(total - support) + _log_factorials(other_trials - total + support)
    probabilities = np.exp(logs - logs.max())
    observed = probabilities[cases - smallest]
    return float(min(probabilities[probabilities <= observed * _EQUAL].sum() / probabilities.sum(), 1.0))


def control_false_discoveries(p_values: Sequence[float]) -> list[float]:
    """Return the q-value of each test: its p-value adjusted by Benjamini and Hochberg (1995)."""
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p)[::-1]
    ranks = np.arange(len(p), 0, -1)
    adjusted = np.minimum.accumulate(p[order] * len(p) / ranks)
    q = np.empty_like(p)
    q[order] = np.minimum(adjusted, 1.0)
    return list(map(float, q))


def _log_factorials(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return log(n!) of integers, [...]: exact below 16, else by Stirling's series."""
    n = np.maximum(numbers, 16).astype(np.float64)
    series = n * np.log(n) - n + 0.5 * np.log(2 * np.pi * n) + 1 / (12 * n) - 1 / (360 * n**3) + 1 / (1260 * n**5)
    small = np.array([math.lgamma(value + 1) for value in range(16)])
    logs: NDArray[np.float64] = np.where(numbers < 16, small[np.minimum(numbers, 15)], series)
    return logs
