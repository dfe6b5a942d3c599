"""Stanford Cars in the devkit's layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from torchvision.datasets import StanfordCars

from opal_deploy.datasets import registry as data
from opal_deploy.errors import UsageError

Make = Callable[..., Path]

# the devkit's order is its own, not the alphabet's
CLASSES = ["Volvo C30 Hatchback 2012", "AM General Hummer SUV 2000"]


def _annotate(path: Path, rows: list[tuple[str, int]]) -> None:
    """As the official files: a 1 x N struct array."""
    fields = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
    table = np.empty((1, len(rows)), dtype=[(field, object) for field in fields])
    for i, (name, label) in enumerate(rows):
        table[0, i] = (1, 1, 9, 9, np.uint8(label), name)
    savemat(path, {"annotations": table})


@pytest.fixture
def folder(tmp_path: Path, draw: Make) -> Path:
    """Two models with five images to train on and one to test each."""
    root = tmp_path / "stanford_cars"
    (root / "devkit").mkdir(parents=True)
    train = [(f"{i + 1:05}.jpg", 1 + i % 2) for i in range(10)]
    test = [("00001.jpg", 2), ("00002.jpg", 1)]
    for split, rows in (("train", train), ("test", test)):
        for name, _ in rows:
            draw(root / f"cars_{split}" / name)
    names = np.empty((1, 2), dtype=object)
    names[0, :] = CLASSES
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    _annotate(root / "devkit" / "cars_train_annos.mat", train)
    _annotate(root / "cars_test_annos_withlabels.mat", test)
    return root


def test_split_and_labels_are_the_official_ones(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert (found.layout, found.crop) == ("cars", None)
    assert (len(found.train), len(found.val), len(found.test)) == (8, 2, 2)
    assert [(s.path, s.label) for s in found.test] == [
        (folder / "cars_test" / "00001.jpg", 1),
        (folder / "cars_test" / "00002.jpg", 0),
    ]
    assert all(s.label == (int(s.path.stem) - 1) % 2 for s in [*found.train, *found.val])
    assert found.warnings == []


def test_class_names_are_the_devkits_in_its_order(folder: Path) -> None:
    assert data.read_dataset(folder).class_names == CLASSES


def test_it_agrees_with_torchvision(folder: Path) -> None:
    theirs = StanfordCars(folder.parent, split="test")
    assert [(str(s.path), s.label) for s in data.read_dataset(folder.parent).test] == theirs._samples


def test_a_folder_of_any_name_will_do(folder: Path, tmp_path: Path) -> None:
    other = folder.rename(tmp_path / "my cars")
    found = data.read_dataset(other)
    assert found.root == other
    assert all(s.path.parent.parent == other for s in found.train)


def test_test_labels_may_lie_in_the_devkit(folder: Path) -> None:
    shutil.move(folder / "cars_test_annos_withlabels.mat", folder / "devkit")
    assert len(data.read_dataset(folder).test) == 2


def test_images_may_lie_a_folder_deeper(folder: Path) -> None:
    for name in ("cars_train", "cars_test"):
        (folder / name).rename(folder / "moved")
        (folder / name).mkdir()
        (folder / "moved").rename(folder / name / name)
    assert data.read_dataset(folder).test[0].path == folder / "cars_test" / "cars_test" / "00001.jpg"


def test_all_that_is_absent_is_named_in_one_line(folder: Path) -> None:
    (folder / "cars_test_annos_withlabels.mat").unlink()
    shutil.rmtree(folder / "cars_test")
    with pytest.raises(UsageError, match=r"Stanford Cars but lacks cars_test/, cars_test_annos_withlabels.mat; unpack"):
        data.read_dataset(folder)


def test_class_ids_beyond_the_devkits_are_an_error(folder: Path) -> None:
    _annotate(folder / "cars_test_annos_withlabels.mat", [("00001.jpg", 2), ("00002.jpg", 7)])
    with pytest.raises(UsageError, match="class ids in the test list outside 1 to 2: 7"):
        data.read_dataset(folder)


def test_a_damaged_list_is_an_error(folder: Path) -> None:
    (folder / "devkit" / "cars_train_annos.mat").write_text("hello")
    with pytest.raises(UsageError, match="its lists for train are damaged or not the official ones") as caught:
        data.read_dataset(folder)
    assert "\n" not in str(caught.value)


def test_missing_and_unlisted_images_are_found(folder: Path) -> None:
    (folder / "cars_test" / "00001.jpg").rename(folder / "cars_test" / "99999.jpg")
    found = data.read_dataset(folder, skip_missing=True)
    assert found.skipped == [folder / "cars_test" / "00001.jpg"]
    assert "1 image is in no list and not used: cars_test/99999.jpg" in found.warnings
