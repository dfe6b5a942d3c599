"""The confusion matrix as an image, and where an evaluation's files go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import UsageError
from opal_deploy.evaluation.report import (
    check_folder,
    create_folder,
    draw_confusion_matrix,
    model_folders,
    write_evaluation,
)


def _drawn(counts: np.ndarray, names: list[str], path: Path) -> np.ndarray:
    draw_confusion_matrix(counts, names, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def _dark(pixels: np.ndarray) -> np.ndarray:
    """Where the colour of a share of 1 is."""
    return np.abs(pixels - [8, 48, 107]).max(axis=2) < 8


def test_a_single_wrong_cell_of_two_hundred_classes_can_be_seen(tmp_path: Path) -> None:
    names = [f"{number}" for number in range(200)]
    counts = np.zeros((200, 200), np.int64)
    counts[150, 20] = 7
    drawn = _drawn(counts, names, tmp_path / "one.png")
    rows, cols = np.nonzero(_dark(drawn[:, : int(0.8 * drawn.shape[1])]))  # without the scale
    # a block of pixels, low on the left: truths are rows, from the top
    assert 4 <= np.ptp(rows) + 1 <= 10
    assert 4 <= np.ptp(cols) + 1 <= 10
    assert rows.mean() > 0.6 * len(drawn)
    assert cols.mean() < 0.3 * drawn.shape[1]


def test_rows_are_normalised(tmp_path: Path) -> None:
    rare, frequent = np.diag([1, 1, 1]), np.diag([1000, 10, 1])
    # without the numbers in the cells
    names = [f"{number}" for number in range(16)]
    images = [
        _drawn(np.pad(counts, (0, 13)), names, tmp_path / f"{n}.png") for n, counts in enumerate((rare, frequent))
    ]
    height = min(len(image) for image in images)
    assert _dark(images[0])[200:height].sum() == _dark(images[1])[200:height].sum() > 0


def test_any_name_can_be_drawn(tmp_path: Path) -> None:
    # warnings are errors here: mathematics, a script that the font lacks, a very long name
    names = ["$x^{$", "鳥", "x" * 300, "<b>&amp;", "cl\udcff"]
    draw_confusion_matrix(np.eye(5, dtype=np.int64), names, tmp_path / "names.png")


def test_several_models_have_a_folder_each(tmp_path: Path) -> None:
    one, two, three = Path("a/best.pt"), Path("b/best.pt"), Path("b/best.onnx")
    assert model_folders(tmp_path, [one]) == [tmp_path]
    assert model_folders(tmp_path, [one, three]) == [tmp_path / "best.pt", tmp_path / "best.onnx"]
    folders = model_folders(tmp_path, [one, two, three])
    assert folders == [tmp_path / "1-best.pt", tmp_path / "2-best.pt", tmp_path / "best.onnx"]


def test_an_earlier_evaluation_is_not_replaced_unasked(tmp_path: Path) -> None:
    out, data = tmp_path / "deep" / "out", tmp_path / "data"
    check_folder(out, data, overwrite=False)
    create_folder(out)
    write_evaluation(out, {})
    with pytest.raises(UsageError, match="already holds an evaluation; give another --out, or --overwrite"):
        check_folder(out, data, overwrite=False)
    check_folder(out, data, overwrite=True)


@pytest.mark.parametrize("below", [".", "out", "a/out", "../data/out"])
def test_a_folder_in_the_data_set_is_refused(tmp_path: Path, below: str) -> None:
    with pytest.raises(UsageError, match="would become part of the data set; give another --out"):
        check_folder(tmp_path / "data" / below, tmp_path / "data", overwrite=True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be made .*; give another --out"):
        create_folder(tmp_path / "file" / "out")
