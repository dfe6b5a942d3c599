"""Summaries of samples and bounds of rates, against known values and scipy."""

import numpy as np
import pytest
from scipy.stats import beta

from opal_deploy.statistics.intervals import (
    clopper_pearson_bound,
    mean,
    mean_with_interval,
    median,
    paired_ratios,
    percentile,
    spread,
    trials_needed,
)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (50, 50.5), (90, 90.1), (95, 95.05), (99, 99.01), (100, 100)]
)
def test_percentiles_interpolate_linearly(percent, expected):
    assert percentile(list(range(100, 0, -1)), percent) == pytest.approx(expected)
    assert percentile([3.0], percent) == 3.0


@pytest.mark.parametrize("function", [mean, mean_with_interval, spread, median, lambda sample: percentile(sample, 50)])
def test_an_empty_sample_has_no_statistics(function):
    with pytest.raises(ValueError, match="at least one value"):
        function([])


def test_the_mean_and_the_spread():
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert spread([90.0, 120.0, 100.0]) == pytest.approx(0.3)


def test_a_medians_interval_holds_it_and_widens_with_confidence():
    sample = np.random.default_rng(2).normal(5.0, 1.0, 30)
    found = median(sample)
    assert found.interval[0] < found.value == np.median(sample) < found.interval[1]
    assert median(sample) == found, "the same every time"
    narrow, wide = median(sample, confidence=0.5).interval, median(sample, confidence=0.99).interval
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert median([2.0] * 30).interval == (2.0, 2.0)


@pytest.mark.parametrize(
    ("estimate", "draw", "truth"),
    [
        # skewed, as ratios and latencies are; its median is ln 2
        pytest.param(median, lambda generator: generator.exponential(1.0, 30), np.log(2), id="median"),
        pytest.param(mean_with_interval, lambda generator: generator.uniform(0.0, 1.0, 40), 0.5, id="mean"),
    ],
)
def test_an_interval_covers_the_truth_about_as_often_as_it_says(estimate, draw, truth):
    generator = np.random.default_rng(3)
    intervals = [estimate(draw(generator), resamples=500).interval for _ in range(300)]
    assert 0.90 <= np.mean([low <= truth <= high for low, high in intervals]) <= 0.99


def test_ratios_are_taken_pair_by_pair():
    assert paired_ratios([2.0, 30.0], [1.0, 10.0]).tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratios([1.0], [1.0, 2.0])


def test_a_means_interval_holds_it_and_is_that_of_a_normal_sample():
    sample = np.random.default_rng(5).normal(-1.0, 2.0, 50)
    found = mean_with_interval(sample)
    assert found.interval[0] < found.value == sample.mean() < found.interval[1]
    assert found.count == 50
    # 1.96 standard errors to each side, or nearly
    half = 1.96 * sample.std() / np.sqrt(50)
    assert found.interval == pytest.approx((found.value - half, found.value + half), abs=0.15 * half)
    assert mean_with_interval(sample) == found, "the same every time"


def test_a_sample_that_is_resampled_in_pieces_has_an_interval_too(monkeypatch):
    sample = np.random.default_rng(7).normal(size=30)
    whole = mean_with_interval(sample, resamples=1000)
    monkeypatch.setattr("opal_deploy.statistics.intervals._MAX_DRAWN", 7 * 30)
    assert mean_with_interval(sample, resamples=1000) == whole


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
def test_bounds_of_small_cases_by_hand(cases, trials, expected):
    assert clopper_pearson_bound(cases, trials) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("trials", [500, 20_000])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_the_bound_is_the_beta_quantile(trials, confidence):
    for cases in (0, 1, 7, 50, 400):
        expected = beta.ppf(confidence, cases + 1, trials - cases)
        assert clopper_pearson_bound(cases, trials, confidence) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("rate", "trials"), [(0.05, 59), (0.01, 299), (0.02, 149), (0.95, 1)])
def test_so_many_trials_without_a_case_are_needed(rate, trials):
    assert trials_needed(rate) == trials
    assert clopper_pearson_bound(0, trials) <= rate + 1e-12
    if trials > 1:
        assert clopper_pearson_bound(0, trials - 1) > rate


@pytest.mark.parametrize(("cases", "trials", "confidence"), [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_what_is_no_proportion_is_refused(cases, trials, confidence):
    with pytest.raises(ValueError, match="cases in"):
        clopper_pearson_bound(cases, trials, confidence)
