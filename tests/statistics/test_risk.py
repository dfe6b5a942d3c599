"""Risk and coverage on cases worked out by hand, and thresholds that are not luck."""

import json

import numpy as np
import pytest

from opal_deploy.statistics.intervals import clopper_pearson_bound
from opal_deploy.statistics.risk import choose_threshold, compute_risk_curve, explain_too_few, smallest_target


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


def test_a_model_that_is_always_right_and_one_that_never_is():
    right, wrong = compute_risk_curve([0.3, 0.1], [True, True]), compute_risk_curve([0.3, 0.1], [False, False])
    assert (right.aurc, right.error, right.coverage_at(0.01)) == (0.0, 0.0, 1.0)
    assert (wrong.aurc, wrong.error, wrong.coverage_at(0.5)) == (1.0, 1.0, 0.0)


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
        ([0, 3, 7], 100, ["of the 60 images of largest margin 3 are wrong"]),
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


@pytest.mark.parametrize(
    "summary", [{}, {"levels": [], "images": 0}, {"levels": [[0.1, 3, 4]], "images": 3}, {"levels": 3, "images": 3}]
)
def test_what_is_no_summary_is_refused(summary):
    with pytest.raises(ValueError, match="not the summary"):
        choose_threshold(summary, 0.05)


@pytest.mark.parametrize(("images", "wrong"), [(20, 0), (60, 46), (300, 20), (2, 2)])
def test_the_smallest_target_is_the_first_of_all_that_has_a_threshold(images: int, wrong: int) -> None:
    summary = compute_risk_curve(np.linspace(0, 1, images), np.arange(images) >= wrong).summary()
    tenths = (tenth / 1000 for tenth in range(1, 1000))
    found = next((rate for rate in tenths if choose_threshold(summary, rate).min_margin is not None), None)
    assert smallest_target(summary) == found
