"""Statistics against known values, scipy, and cases worked out by hand."""

import json

import numpy as np
import pytest
from scipy.stats import beta

from opal_deploy.statistics import (
    choose_threshold,
    clopper_pearson_bound,
    compute_risk_curve,
    explain_too_few,
    mean,
    mean_with_interval,
    median,
    paired_ratios,
    percentile,
    smallest_target,
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


def test_the_spread_is_relative_to_the_median():
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
    ("estimate", "draw", "actual"),
    [
        # skewed, as ratios and latencies are; its median is ln 2
        pytest.param(median, lambda generator: generator.exponential(1.0, 30), np.log(2), id="median"),
        pytest.param(mean_with_interval, lambda generator: generator.uniform(0.0, 1.0, 40), 0.5, id="mean"),
    ],
)
def test_an_interval_covers_the_actual_value_about_as_often_as_it_says(estimate, draw, actual):
    generator = np.random.default_rng(3)
    intervals = [estimate(draw(generator), resamples=500).interval for _ in range(300)]
    assert 0.90 <= np.mean([low <= actual <= high for low, high in intervals]) <= 0.99


def test_ratios_are_taken_pair_by_pair():
    assert paired_ratios([2.0, 30.0], [1.0, 10.0]).tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="expected pairs"):
        paired_ratios([1.0], [1.0, 2.0])


def test_the_interval_of_a_mean_is_that_of_a_normal_sample_in_one_piece_or_several(monkeypatch):
    sample = np.random.default_rng(5).normal(-1.0, 2.0, 50)
    found = mean_with_interval(sample)
    assert (found.value, found.count) == (sample.mean(), 50)
    # about 1.96 standard errors to each side
    half = 1.96 * sample.std() / np.sqrt(50)
    assert found.interval == pytest.approx((found.value - half, found.value + half), abs=0.15 * half)
    monkeypatch.setattr("opal_deploy.statistics._MAX_DRAWN", 7 * 50)
    assert mean_with_interval(sample) == found


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


def test_five_images_by_hand():
    # by falling margin: right, right, wrong, right, wrong
    curve = compute_risk_curve([0.2, 0.9, 0.4, 0.8, 0.6], [False, True, True, True, False])
    assert curve.margins.tolist() == [0.9, 0.8, 0.6, 0.4, 0.2]
    assert curve.answered.tolist() == [1, 2, 3, 4, 5]
    assert curve.wrong.tolist() == [0, 0, 1, 1, 2]
    assert curve.error == 0.4
    assert curve.aurc == pytest.approx((0 + 0 + 1 / 3 + 1 / 4 + 2 / 5) / 5)
    assert curve.coverage_at(0.0) == 0.4
    # a threshold may answer more than the first that is over the rate
    assert curve.coverage_at(0.25) == 0.8
    assert curve.coverage_at(0.3) == 0.8
    assert curve.coverage_at(0.4) == 1.0


def test_equal_margins_are_answered_together_in_whatever_order_they_come():
    margins = np.array([0.5, 0.5, 0.5, 0.5, 0.1])
    correct = np.array([True, False, True, True, True])
    curves = [compute_risk_curve(margins[order], correct[order]) for order in ([0, 1, 2, 3, 4], [1, 0, 4, 3, 2])]
    for curve in curves:
        assert curve.answered.tolist() == [4, 5]
        assert curve.wrong.tolist() == [1, 1]
        # the wrong one of four is a quarter of a wrong one in each place
        assert curve.aurc == pytest.approx((4 * 0.25 + 0.2) / 5)
        assert curve.coverage_at(0.1) == 0.0


@pytest.mark.parametrize(("correct", "figures"), [(True, (0.0, 0.0, 1.0)), (False, (1.0, 1.0, 0.0))])
def test_a_model_that_is_always_right_and_one_that_never_is(correct, figures):
    curve = compute_risk_curve([0.3, 0.1], [correct] * 2)
    assert (curve.aurc, curve.error, curve.coverage_at(0.5)) == figures


@pytest.mark.parametrize(
    ("margins", "correct"), [([], []), ([0.1], [True, False]), ([float("nan")], [True])], ids=["none", "odd", "nan"]
)
def test_answers_that_are_no_set_are_refused(margins, correct):
    with pytest.raises(ValueError, match="at least one"):
        compute_risk_curve(margins, correct)


def test_levels_are_tenths_of_coverage():
    curve = compute_risk_curve(np.arange(25), np.arange(25) >= 5)  # the five of least margin are wrong
    assert [(level.answered, level.wrong) for level in curve.levels()] == [
        (3, 0), (5, 0), (8, 0), (10, 0), (13, 0), (15, 0), (18, 0), (20, 0), (23, 3), (25, 5),
    ]  # fmt: skip
    assert curve.levels()[0].margin == 22.0
    assert curve.levels()[-1].margin == 0.0
    # equal levels are kept once
    assert [level.answered for level in compute_risk_curve([1.0] * 8 + [0.0], [True] * 9).levels()] == [8, 9]


def summarise(wrong_at, images):
    """Falling margins 1 ... 0; the images at these places, counted from 0, are wrong."""
    correct = np.ones(images, np.bool_)
    correct[wrong_at] = False
    return compute_risk_curve(np.linspace(1.0, 0.0, images), correct).summary()


def test_the_threshold_by_hand():
    # levels 100, 200, ..., 1000; at most 5 %: 100 answered may have 1 wrong (4.66 %), 200 may have 4 (4.53 %)
    summary = summarise([50, 150, 160, 170, 250, 260, 350, 450, 451, 452, 453, 454, *range(500, 600, 4)], 1000)
    threshold = choose_threshold(summary, 0.05)
    assert clopper_pearson_bound(1, 100) == pytest.approx(0.04656, abs=1e-5)
    # 500 answered, 12 wrong, is the last level under 5 %: with 600 there are 37
    assert (threshold.answered, threshold.wrong, threshold.coverage) == (500, 12, 0.5)
    assert threshold.min_margin == pytest.approx(1 - 499 / 999)
    assert threshold.bound == clopper_pearson_bound(12, 500) <= 0.05
    assert threshold.reason == ""


def test_the_first_level_that_fails_ends_the_search_even_if_a_later_one_would_pass():
    # 5 wrong among the 200 most certain, and then none any more
    summary = summarise([*range(100, 105)], 1000)
    threshold = choose_threshold(summary, 0.05)
    assert clopper_pearson_bound(5, 200) > 0.05 >= clopper_pearson_bound(5, 1000)
    assert (threshold.answered, threshold.wrong) == (100, 0)


def test_where_everything_may_be_answered_the_smallest_margin_is_the_threshold():
    threshold = choose_threshold(summarise([], 80), 0.05)
    assert (threshold.min_margin, threshold.coverage, threshold.answered) == (0.0, 1.0, 80)


@pytest.mark.parametrize(
    ("wrong_at", "images", "reasons"),
    [
        ([], 58, ["58 labelled images cannot show", "59 are needed"]),
        ([0, 3, 7], 100, ["3 of the 60 images with the largest margins are wrong"]),
    ],
    ids=["too few images", "certain and wrong"],
)
def test_a_summary_may_support_nothing(wrong_at, images, reasons):
    threshold = choose_threshold(summarise(wrong_at, images), 0.05)
    assert threshold.min_margin is threshold.to_dict()["min_margin"] is None
    assert all(reason in threshold.reason for reason in reasons)
    assert explain_too_few(59, 0.05) == ""


def test_a_chosen_threshold_holds_on_new_images_as_often_as_it_says():
    # the chance of an error falls with the margin: at threshold t it is 0.15 (1 - t) on average over margins over t
    generator = np.random.default_rng(1)
    broken = chosen = 0
    for _ in range(400):
        margins = generator.uniform(size=1000)
        correct = generator.uniform(size=1000) > 0.3 * (1 - margins)
        threshold = choose_threshold(compute_risk_curve(margins, correct).summary(), 0.05)
        if threshold.min_margin is not None:
            chosen += 1
            broken += 0.15 * (1 - threshold.min_margin) > 0.05
    assert chosen > 200
    assert broken <= 0.07 * 400


def test_the_summary_survives_json_and_still_gives_the_same_threshold():
    summary = summarise([90, 95], 100)
    assert choose_threshold(json.loads(json.dumps(summary)), 0.05) == choose_threshold(summary, 0.05)
    assert summary["coverage_at_error"] == {"0.01": 0.9, "0.02": 1.0, "0.05": 1.0}


@pytest.mark.parametrize(("images", "wrong"), [(20, 0), (60, 46), (300, 20), (2, 2)])
def test_the_smallest_target_is_the_first_of_all_that_has_a_threshold(images: int, wrong: int) -> None:
    summary = compute_risk_curve(np.linspace(0, 1, images), np.arange(images) >= wrong).summary()
    tenths = (tenth / 1000 for tenth in range(1, 1000))
    found = next((rate for rate in tenths if choose_threshold(summary, rate).min_margin is not None), None)
    assert smallest_target(summary) == found
