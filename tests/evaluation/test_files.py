"""The files of an evaluation: folders, the confusion matrix as a plot, risk over coverage."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import UsageError
from opal_deploy.evaluation.files import (
    EVALUATION,
    check_folder,
    create_folder,
    draw_confusion_matrix,
    model_folders,
    write_risk,
)
from opal_deploy.evaluation.inputs import check_support
from opal_deploy.evaluation.result import format_threshold
from opal_deploy.statistics import choose_threshold, compute_risk_curve, smallest_target


def _drawn(counts, names, path):
    draw_confusion_matrix(counts, names, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def _dark(pixels):
    """Where the colour of a share of 1 is."""
    return np.abs(pixels - [8, 48, 107]).max(axis=2) < 8


def test_a_single_wrong_cell_of_two_hundred_classes_can_be_seen(tmp_path):
    names = [f"{number}" for number in range(200)]
    counts = np.zeros((200, 200), np.int64)
    counts[150, 20] = 7
    drawn = _drawn(counts, names, tmp_path / "one.png")
    rows, cols = np.nonzero(_dark(drawn[:, : int(0.8 * drawn.shape[1])]))  # without the scale
    # a block of pixels, low on the left: labels are rows, from the top
    assert 4 <= np.ptp(rows) + 1 <= 10
    assert 4 <= np.ptp(cols) + 1 <= 10
    assert rows.mean() > 0.6 * len(drawn)
    assert cols.mean() < 0.3 * drawn.shape[1]


def test_rows_are_normalised(tmp_path):
    # more than 15 classes: without the numbers in the cells
    names = [f"{number}" for number in range(16)]
    counts = (np.diag([1, 1, 1]), np.diag([1000, 10, 1]))
    rare, frequent = (_drawn(np.pad(c, (0, 13)), names, tmp_path / f"{n}.png") for n, c in enumerate(counts))
    height = min(len(rare), len(frequent))
    assert _dark(rare)[200:height].sum() == _dark(frequent)[200:height].sum() > 0


def test_any_name_is_drawn_at_both_axes(tmp_path):
    # mathematics, a script that the font lacks, a very long name: warnings are errors here
    names = ["$x^{$", "鳥", "x" * 300, "<b>&amp;", r"cl\xff"]
    named, plain = (_drawn(np.eye(5, dtype=np.int64), each, tmp_path / "n.png") for each in (names, ["a"] * 5))
    # the long name takes room that one letter does not
    assert _dark(named).sum() < 0.9 * _dark(plain).sum()


def test_several_models_have_a_folder_each(tmp_path):
    one, two, three = Path("a/best.pt"), Path("b/best.pt"), Path("b/best.onnx")
    assert model_folders(tmp_path, [one]) == [tmp_path]
    assert model_folders(tmp_path, [one, three]) == [tmp_path / "best.pt", tmp_path / "best.onnx"]
    folders = model_folders(tmp_path, [one, two, three])
    assert folders == [tmp_path / "1-best.pt", tmp_path / "2-best.pt", tmp_path / "best.onnx"]


def test_only_overwrite_replaces_an_earlier_evaluation(tmp_path):
    out, data = tmp_path / "deep" / "out", tmp_path / "data"
    check_folder(out, data, overwrite=False)
    create_folder(out)
    (out / EVALUATION).touch()
    with pytest.raises(UsageError, match="already holds an evaluation; give another --out, or --overwrite"):
        check_folder(out, data, overwrite=False)
    check_folder(out, data, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be created .*; give another --out"):
        create_folder(tmp_path / "file" / "out")


@pytest.mark.parametrize("below", [".", "out", "a/out", "../data/out"])
def test_a_folder_in_the_data_set_is_refused(tmp_path, below):
    with pytest.raises(UsageError, match="would become part of the data set; give another --out"):
        check_folder(tmp_path / "data" / below, tmp_path / "data", overwrite=True)


def test_too_few_images_for_an_error_rate_are_refused_with_the_rate_that_they_support():
    check_support(59, 0.05)
    with pytest.raises(UsageError, match=r"--target-error 5%: 58 labelled images .* 59 are needed; give more images"):
        check_support(58, 0.05)
    with pytest.raises(UsageError, match=r"or a rate of 3\.7% or more$"):
        check_support(80, 0.01)
    check_support(80, 0.037)


def test_the_table_has_a_row_for_each_threshold(tmp_path):
    write_risk(tmp_path, compute_risk_curve([0.5, 0.3, 0.3, 0.1], [True, False, True, True]), None)
    header, *rows = (tmp_path / "risk_coverage.csv").read_text().splitlines()
    assert header == "min_margin,answered,coverage,wrong,error"
    values = [[float(cell) for cell in row.split(",")] for row in rows]
    assert values == [[0.5, 1, 0.25, 0, 0.0], [0.3, 3, 0.75, 1, 1 / 3], [0.1, 4, 1.0, 1, 0.25]]


def test_the_area_under_the_curve_spreads_wrong_answers_over_equal_margins():
    summary = compute_risk_curve([0.5, 0.3, 0.3, 0.1], [True, False, True, True]).summary()
    assert summary["aurc"] == pytest.approx((0 + 0.5 / 2 + 1 / 3 + 1 / 4) / 4)
    assert (summary["error"], summary["coverage_at_error"]["0.05"]) == (0.25, 0.25)
    assert summary["levels"] == [[0.5, 1, 0], [0.3, 3, 1], [0.1, 4, 1]]


def test_a_threshold_keeps_the_bound_not_the_share_and_stops_at_the_first_that_fails():
    # 100 images without an error, then 100 of which 20 are wrong
    curve = compute_risk_curve(np.linspace(1, 0, 200), np.r_[np.ones(100, bool), np.arange(100) % 5 > 0])
    threshold = choose_threshold(curve.summary(), 0.05)
    assert (threshold.answered, threshold.wrong, threshold.coverage) == (100, 0, 0.5)
    assert threshold.bound == pytest.approx(1 - 0.05 ** (1 / 100))
    assert choose_threshold(compute_risk_curve(np.ones(80), np.arange(80) > 3).summary(), 0.05).min_margin is None


def test_a_printed_threshold_can_be_typed_back():
    curve = compute_risk_curve(np.linspace(1.0, 1 / 3, 80), np.ones(80, np.bool_))
    threshold = choose_threshold(curve.summary(), 0.05)
    assert float(format_threshold(threshold).split()[1]) == threshold.min_margin == curve.margins[-1]
    smallest = smallest_target(curve.summary())
    refusal = format_threshold(choose_threshold(curve.summary(), 0.01), smallest)
    assert refusal.endswith("--target-error 3.7% is the smallest that works")
    assert choose_threshold(curve.summary(), smallest).min_margin is not None


@pytest.mark.parametrize("target", [None, 0.2, 0.01], ids=["no target", "threshold", "no threshold"])
def test_the_curve_is_drawn_with_and_without_a_threshold(tmp_path, target):
    curve = compute_risk_curve(np.linspace(1.0, 0.0, 80), np.arange(80) < 70)
    write_risk(tmp_path, curve, None if target is None else choose_threshold(curve.summary(), target))
    assert (tmp_path / "risk_coverage.png").read_bytes().startswith(b"\x89PNG")
