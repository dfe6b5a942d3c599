"""Knowing when not to answer, in `evaluate`: rates as they are typed, files, and margins as the records have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import risk
from opal_deploy.evaluation.metrics import margins
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import build_record
from opal_deploy.statistics.risk import choose_threshold, compute_risk_curve


def test_too_few_pictures_are_refused() -> None:
    risk.check_support(59, 0.05)
    with pytest.raises(UsageError, match=r"--target-error 5%: 58 labelled images .* 59 are needed; give more images"):
        risk.check_support(58, 0.05)


def test_margins_are_those_of_the_records() -> None:
    generator = np.random.default_rng(0)
    scores = generator.uniform(size=(20, 8)).astype(np.float32)
    logits = generator.normal(size=(20, 4)).astype(np.float32)
    logits[0] = 0.0  # equal ones: the lowest classes
    metadata = Metadata(("a", "b", "c", "d"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (2, 2), (8, 8))
    outputs = Outputs(logits, np.zeros((20, 8), np.int32), scores)
    records = [build_record("x", Geometry.whole(8, 8), outputs, row, metadata) for row in range(20)]

    assert margins(logits, scores, 2, 1e-8).tolist() == [record["margin"] for record in records]


def test_the_table_has_a_row_for_each_threshold() -> None:
    header, rows = risk.curve_table(compute_risk_curve([0.5, 0.3, 0.3, 0.1], [True, False, True, True]))

    assert header == ["min_margin", "answered", "coverage", "wrong", "error"]
    assert rows == [[0.5, 1, 0.25, 0, 0.0], [0.3, 3, 0.75, 1, 1 / 3], [0.1, 4, 1.0, 1, 0.25]]


def test_what_is_said_of_a_threshold_can_be_typed_back() -> None:
    curve = compute_risk_curve(np.linspace(1.0, 1 / 3, 80), np.ones(80, np.bool_))
    found = choose_threshold(curve.summary(), 0.05)
    (line,) = risk.format_threshold(found)

    assert float(line.split()[1]) == found.min_margin == curve.margins[-1]
    assert "answers 100.0% of 80 images, 0 of 80 wrong" in line
    assert "with 95% confidence at most 3.68 %" in line
    (refusal,) = risk.format_threshold(choose_threshold(curve.summary(), 0.01))
    assert "no --min-margin is known to give an error rate of at most 1 %: 80 labelled images cannot" in refusal


def test_the_picture_is_drawn_with_and_without_a_threshold(tmp_path: Path) -> None:
    curve = compute_risk_curve(np.linspace(1.0, 0.0, 80), np.arange(80) < 70)
    for number, threshold in enumerate(
        (None, choose_threshold(curve.summary(), 0.2), choose_threshold(curve.summary(), 0.01))
    ):
        risk.draw_curve(curve, threshold, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")
