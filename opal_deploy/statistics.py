"""Bounds of rates, and the margin that keeps an error rate: what runs where SciPy is not installed.

A classifier abstains where its margin is below a threshold. Coverage is the share of images that it answers, risk the
share of wrong predictions among these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
# the error rates that `--min-margin` takes
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


def clopper_pearson_bound(cases: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """Return Clopper and Pearson's one-sided upper bound of a rate; 1 without trials.

    Whatever the true rate, the bound exceeds it in at least `confidence` of all samples of independent trials.
    """
    k = np.arange(cases + 1)
    # logarithms of the binomial coefficients
    ways = np.concatenate([[0.0], np.cumsum(np.log((trials - k[1:] + 1) / k[1:]))])
    low, high = cases / max(trials, 1), 1.0
    # halvings of [0, 1], until float64's resolution
    while cases < trials and low < (rate := (low + high) / 2) < high:
        at_most = float(np.exp(ways + k * math.log(rate) + (trials - k) * math.log1p(-rate)).sum())
        low, high = (rate, high) if at_most > 1.0 - confidence else (low, rate)
    return high


def share_bounds(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Clopper and Pearson's lower and upper bound of `hits` in `trials`, each one-sided at `confidence`."""
    low = 1.0 - clopper_pearson_bound(trials - hits, trials, confidence)
    return low, clopper_pearson_bound(hits, trials, confidence)


@dataclass(frozen=True)
class OperatingPoint:
    """A margin below which a model abstains to keep an error rate, and its effect on labelled images."""

    min_margin: float
    answered: int  # answered, wrong: numbers of images with at least this margin
    wrong: int
    bound: float  # Clopper and Pearson's upper bound of the error rate at this margin, 0 ... 1


def choose_threshold(risk: Mapping[str, Any], rate: float) -> OperatingPoint | None:
    """Choose the lowest margin whose error rate is at most `rate`, 0 ... 1, with 95 % confidence; None if none is.

    The upper bound, not the observed share, has to be at most `rate`. Margins are tried from the strictest that answers
    enough images, until one fails (fixed-sequence testing), so that the confidence holds for the choice among them too.

    Args:
        risk: the stored summary of a risk-coverage curve, whose `levels` are (margin, answered, wrong).
    """
    chosen = None
    for margin, answered, wrong in risk["levels"]:
        # even without errors, fewer images show no such rate
        if clopper_pearson_bound(0, answered) > rate * (1 + 1e-9):
            continue
        bound = clopper_pearson_bound(wrong, answered)
        if bound > rate:
            break
        chosen = OperatingPoint(margin, answered, wrong, bound)
    return chosen


def supported_rates(risk: Mapping[str, Any]) -> list[float]:
    """Return those of RATES that have a threshold in a stored summary."""
    return [rate for rate in RATES if choose_threshold(risk, rate) is not None]
