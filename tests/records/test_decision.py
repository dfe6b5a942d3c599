"""Thresholds: numbers and rates, what they are read from, and which one decides."""

from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.metrics import summarize_risk
from opal_deploy.records.decision import THRESHOLDS, Decision, describe_supported_rates
from opal_deploy.statistics import choose_threshold


def choose_margin(value, path, metadata):
    return Decision(min_margin=value).resolve(path, metadata, lambda text: None).min_margin


def test_a_margin_is_taken_as_it_is_and_other_text_refused(exact_model):
    metadata = read_metadata(exact_model)
    assert choose_margin("0.05", exact_model, metadata) == 0.05
    for text in ("some", "nan", "inf", "1e400", "1_0", "٣", "-0.1", ""):
        with pytest.raises(UsageError, match="margin"):
            choose_margin(text, exact_model, metadata)
    for text in ("1_0%", "٣%", "nan%"):
        with pytest.raises(UsageError, match="percentage"):
            choose_margin(text, exact_model, metadata)


def test_a_rate_takes_the_margin_that_the_validation_images_support(exact_model):
    # of a thousand images the hundred of smallest margin are wrong
    margins = np.linspace(0, 1, 1000)
    summary = summarize_risk(margins, np.arange(1000) >= 100)
    metadata = replace(read_metadata(exact_model), risk=summary)
    expected = choose_threshold(summary, 0.05).min_margin
    assert expected is not None
    assert choose_margin("5%", exact_model, metadata) == expected
    assert 0 < expected <= 0.11


def test_a_rate_that_validation_images_cannot_support_is_refused(exact_model):
    few = summarize_risk(np.linspace(0, 1, 20), np.ones(20, bool))
    # as is said when the model is made
    assert list(describe_supported_rates(few, None)) == [
        "--min-margin takes 20%: 0 of 20 validation images are wrong, and more images allow lower rates"
    ]
    for risk, message in (
        (few, "20 validation images support 20%; give"),
        ({}, r"has no validation images.*--split val --record"),
    ):
        with pytest.raises(UsageError, match=message):
            choose_margin("5%", exact_model, replace(read_metadata(exact_model), risk=risk))


def test_the_first_threshold_that_holds_decides(exact_model):
    metadata = read_metadata(exact_model)
    decision = Decision(min_margin=0.1, unknown=0.7)
    for values, status in (
        ({"margin": 0.05, "ood_score": 0.8}, "unknown"),
        ({"margin": 0.05, "ood_score": 0.7}, "abstained"),
        ({"margin": 0.1, "ood_score": None}, "ok"),
        ({"margin": None}, "ok"),
    ):
        found, reason = decision.judge(values, 0, (), metadata)
        assert (found, bool(reason)) == (status, status == "unknown")


def test_a_document_gives_the_numbers_back_():
    decision = Decision(min_margin=0.1, unknown=0.7)
    assert Decision.read(decision.limits) == decision
    assert Decision.read({"unknown": 0.5, "min_margin": "often", "top": 3}) == Decision(unknown=0.5)
    assert set(Decision().limits) == set(THRESHOLDS)
