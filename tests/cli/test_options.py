"""Options shared by several commands, and margins chosen for an error rate."""

from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.errors import UsageError
from opal_deploy.inference.setup import parse_min_margin
from opal_deploy.options import parse_rate
from opal_deploy.statistics import choose_threshold, compute_risk_curve


@pytest.mark.parametrize(("text", "rate"), [("5%", 0.05), (" 0.5 %", 0.005), ("99%", 0.99)])
def test_rates_are_percentages(text, rate):
    assert parse_rate("--x", text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["5", "0.05", "0%", "100%", "-1%", "nan%", "many%", "%", ""])
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(UsageError, match=r"--x .*expected a percentage between 0 and 100, such as 5%"):
        parse_rate("--x", text)


def test_a_margin_is_taken_as_it_is_and_other_text_refused(exact_model):
    metadata = read_metadata(exact_model)
    assert parse_min_margin("0.05", exact_model, metadata) == 0.05
    with pytest.raises(UsageError, match=r"expected a margin such as 0.05, or an error rate such as 5%"):
        parse_min_margin("some", exact_model, metadata)


def test_a_rate_takes_the_margin_that_the_validation_images_support(exact_model):
    # of a thousand images the hundred of smallest margin are wrong
    margins = np.linspace(0, 1, 1000)
    summary = compute_risk_curve(margins, np.arange(1000) >= 100).summary()
    metadata = replace(read_metadata(exact_model), risk=summary)
    expected = choose_threshold(summary, 0.05).min_margin
    assert expected is not None
    assert parse_min_margin("5%", exact_model, metadata) == expected
    assert 0 < expected <= 0.11


def test_a_rate_that_validation_images_cannot_support_is_refused(exact_model):
    few = compute_risk_curve(np.linspace(0, 1, 20), np.ones(20, bool)).summary()
    for risk, message in (
        (few, r"20 validation images\); the smallest rate that works is 14%$"),
        ({}, r"has no validation images.*--target-error 5%"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_min_margin("5%", exact_model, replace(read_metadata(exact_model), risk=risk))
