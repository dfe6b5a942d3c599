"""The folder of an evaluation, and the line on a chosen margin."""

import numpy as np
import pytest

from opal_deploy.errors import UsageError
from opal_deploy.evaluation.metrics import TargetMargin, summarize_risk
from opal_deploy.evaluation.result import EVALUATION, check_folder, create_folder, format_curve, format_threshold


def test_only_overwrite_replaces_an_earlier_evaluation(tmp_path):
    out, data = tmp_path / "out", tmp_path / "data"
    check_folder(out, data, overwrite=False)
    create_folder(out)
    (out / EVALUATION).touch()
    with pytest.raises(UsageError, match="--overwrite"):
        check_folder(out, data, overwrite=False)
    check_folder(out, data, overwrite=True)
    with pytest.raises(UsageError, match="cannot be created"):
        create_folder(out / EVALUATION / "below")


@pytest.mark.parametrize("below", [".", "a/out", "../data/out"])
def test_a_folder_in_the_data_set_is_refused(tmp_path, below):
    with pytest.raises(UsageError, match="part of the data set"):
        check_folder(tmp_path / "data" / below, tmp_path / "data", overwrite=True)


def test_a_margin_is_told_with_its_bound_or_the_rates_that_have_one():
    summary = summarize_risk(np.linspace(1.0, 1 / 3, 80), np.ones(80, np.bool_))
    chosen = TargetMargin.choose(summary, 0.05)
    assert f"--min-margin {chosen.min_margin!r} for an error rate of at most 5 %" in format_threshold(chosen, summary)
    refused = format_threshold(TargetMargin.choose(summary, 0.01), summary)
    assert refused.endswith("80 images; they support 5%, 10%, 20%")
    assert "error 0.00% without abstaining (80 images)" in format_curve(summary)
