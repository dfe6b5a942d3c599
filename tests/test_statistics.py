"""Statistics against known values, scipy, and cases worked out by hand."""

import json

import numpy as np
import pytest
from scipy.stats import beta

from opal_deploy.evaluation.metrics import summarize_risk
from opal_deploy.statistics import choose_threshold, clopper_pearson_bound, share_bounds, supported_rates


@pytest.mark.parametrize(("trials", "confidence"), [(500, 0.9), (20_000, 0.999)])
def test_the_bound_is_the_beta_quantile(trials, confidence):
    assert clopper_pearson_bound(0, 0) == clopper_pearson_bound(trials, trials) == 1.0
    for cases in (0, 1, 7, 50, 400):
        expected = beta.ppf(confidence, cases + 1, trials - cases)
        assert clopper_pearson_bound(cases, trials, confidence) == pytest.approx(expected, rel=1e-9)
        assert share_bounds(trials - cases, trials, confidence)[0] == pytest.approx(1 - expected)


def test_five_images_by_hand():
    # by falling margin: right, right, wrong, right, wrong
    summary = summarize_risk([0.2, 0.9, 0.4, 0.8, 0.6], [False, True, True, True, False])
    assert summary["levels"] == [[0.9, 1, 0], [0.8, 2, 0], [0.6, 3, 1], [0.4, 4, 1], [0.2, 5, 2]]
    assert summary["error"] == 0.4
    assert summary["aurc"] == pytest.approx((0 + 0 + 1 / 3 + 1 / 4 + 2 / 5) / 5)
    assert set(summary["coverage_at_error"].values()) == {0.4}


def test_equal_margins_are_answered_together_in_whatever_order_they_come():
    margins = np.array([0.5, 0.5, 0.5, 0.5, 0.1])
    correct = np.array([True, False, True, True, True])
    for order in ([0, 1, 2, 3, 4], [1, 0, 4, 3, 2]):
        summary = summarize_risk(margins[order], correct[order])
        assert summary["levels"] == [[0.5, 4, 1], [0.1, 5, 1]]
        # the wrong one of four is a quarter of a wrong one in each place
        assert summary["aurc"] == pytest.approx((4 * 0.25 + 0.2) / 5)
        assert summary["coverage_at_error"]["0.05"] == 0.0


def test_levels_are_tenths_of_coverage():
    # the five of least margin are wrong
    levels = summarize_risk(np.arange(25), np.arange(25) >= 5)["levels"]
    assert [(answered, wrong) for _, answered, wrong in levels] == [
        (3, 0), (5, 0), (8, 0), (10, 0), (13, 0), (15, 0), (18, 0), (20, 0), (23, 3), (25, 5),
    ]  # fmt: skip
    assert (levels[0][0], levels[-1][0]) == (22.0, 0.0)
    # equal levels are kept once
    few = summarize_risk([1.0] * 8 + [0.0], [True] * 9)["levels"]
    assert [answered for _, answered, _ in few] == [8, 9]


def summarise(wrong_at, images):
    """Falling margins 1 ... 0; the images at these places, counted from 0, are wrong."""
    correct = np.ones(images, np.bool_)
    correct[wrong_at] = False
    return summarize_risk(np.linspace(1.0, 0.0, images), correct)


def test_the_threshold_by_hand():
    # levels 100, 200, ..., 1000; at most 5 %: 100 answered may have 1 wrong (4.66 %), 200 may have 4 (4.53 %)
    summary = summarise([50, 150, 160, 170, 250, 260, 350, 450, 451, 452, 453, 454, *range(500, 600, 4)], 1000)
    point = choose_threshold(json.loads(json.dumps(summary)), 0.05)
    assert clopper_pearson_bound(1, 100) == pytest.approx(0.04656, abs=1e-5)
    # 500 answered, 12 wrong, is the last level under 5 %: with 600 there are 37
    assert (point.answered, point.wrong) == (500, 12)
    assert point.min_margin == pytest.approx(1 - 499 / 999)
    assert point.bound == clopper_pearson_bound(12, 500) <= 0.05
    assert supported_rates(summary) == [0.05, 0.1, 0.2]


def test_the_first_level_that_fails_ends_the_search_even_if_a_later_one_would_pass():
    # 5 wrong among the 200 most certain, and then none any more
    point = choose_threshold(summarise([*range(100, 105)], 1000), 0.05)
    assert clopper_pearson_bound(5, 200) > 0.05 >= clopper_pearson_bound(5, 1000)
    assert (point.answered, point.wrong) == (100, 0)


def test_a_summary_may_support_nothing():
    # even without errors, 59 images are needed
    assert choose_threshold(summarise([], 58), 0.05) is None
    assert choose_threshold(summarise([], 59), 0.05).answered == 59
    # certain and wrong
    assert choose_threshold(summarise([0, 3, 7], 100), 0.05) is None
    assert supported_rates(summarise([0, 1], 2)) == []


def test_a_chosen_threshold_holds_on_new_images_as_often_as_it_says():
    # the chance of an error falls with the margin: at threshold t it is 0.15 (1 - t) on average over margins over t
    generator = np.random.default_rng(1)
    broken = chosen = 0
    for _ in range(400):
        margins = generator.uniform(size=1000)
        correct = generator.uniform(size=1000) > 0.3 * (1 - margins)
        point = choose_threshold(summarize_risk(margins, correct), 0.05)
        if point is not None:
            chosen += 1
            broken += 0.15 * (1 - point.min_margin) > 0.05
    assert chosen > 200
    assert broken <= 0.07 * 400
