"""The exact bound of a rate, against values that can be worked out by hand and against scipy's beta quantile."""

from __future__ import annotations

import numpy as np
import pytest

from opal_deploy.statistics.intervals import clopper_pearson_bound, trials_needed


@pytest.mark.parametrize(
    ("cases", "trials", "expected"),
    [
        (0, 1, 0.95),  # 1 - 0.05
        (0, 59, 1 - 0.05 ** (1 / 59)),
        (1, 2, 0.95**0.5),  # not two of two: 1 - p^2 = 0.05
        (5, 5, 1.0),
        (0, 0, 1.0),
    ],
)
def test_small_cases_by_hand(cases: int, trials: int, expected: float) -> None:
    assert clopper_pearson_bound(cases, trials) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("cases", [0, 1, 7, 50, 400])
@pytest.mark.parametrize("trials", [500, 20_000])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_it_is_the_beta_quantile(cases: int, trials: int, confidence: float) -> None:
    from scipy.stats import beta

    expected = beta.ppf(confidence, cases + 1, trials - cases)
    assert clopper_pearson_bound(cases, trials, confidence) == pytest.approx(expected, rel=1e-9)


def test_it_covers_the_true_rate_at_least_as_often_as_it_says() -> None:
    seen = np.random.default_rng(0).binomial(80, 0.07, 4000)
    bounds = {int(cases): clopper_pearson_bound(int(cases), 80) for cases in np.unique(seen)}

    assert np.mean([bounds[int(cases)] >= 0.07 for cases in seen]) >= 0.95


@pytest.mark.parametrize(("rate", "trials"), [(0.05, 59), (0.01, 299), (0.02, 149), (0.95, 1)])
def test_so_many_trials_without_a_case_are_needed(rate: float, trials: int) -> None:
    assert trials_needed(rate) == trials
    assert clopper_pearson_bound(0, trials) <= rate + 1e-12
    if trials > 1:
        assert clopper_pearson_bound(0, trials - 1) > rate


@pytest.mark.parametrize(("cases", "trials", "confidence"), [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_what_is_no_proportion_is_refused(cases: int, trials: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="cases in"):
        clopper_pearson_bound(cases, trials, confidence)
