"""How large a rate may be of which only so many cases were seen: the exact one-sided bound of Clopper and Pearson."""

from __future__ import annotations

import math

import numpy as np

# halvings of [0, 1]: beyond what a float64 tells apart
_HALVINGS = 60


def upper_bound(cases: int, trials: int, confidence: float = 0.95) -> float:
    """The largest rate under which `cases` or fewer in `trials` still happen with probability 1 - `confidence`.

    Clopper and Pearson's one-sided upper bound: whatever the true rate, it is exceeded by the bound in at least
    `confidence` of all samples of independent trials. Without a case it is 1 - (1 - confidence)^(1 / trials).

    Args:
        cases: 0 ... trials.
        trials: 0 or more; without trials the bound is 1.
        confidence: between 0 and 1.

    Raises:
        ValueError: more cases than trials, or a confidence that is none.
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


def trials_needed(rate: float, confidence: float = 0.95) -> int:
    """How many trials without a single case put the upper bound at `rate` or under it.

    Args:
        rate: between 0 and 1.
        confidence: between 0 and 1.
    """
    # rounded, so that a count that fits exactly is not one more by rounding
    return math.ceil(round(math.log(1.0 - confidence) / math.log1p(-rate), 9))
