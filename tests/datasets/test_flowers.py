"""Oxford Flowers-102 with its official lists."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.io import loadmat
from torchvision.datasets import Flowers102

from opal_deploy.datasets import registry as data
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError

Make = Callable[..., Path]

LISTS = ("setid.mat", "imagelabels.mat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, draw: Make, flowers102_annotations: Path) -> Path:
    """The official lists beside two training and one validation image of every species, and five to test."""
    root = tmp_path_factory.mktemp("torchvision") / "flowers-102"
    root.mkdir()
    for name in LISTS:
        shutil.copy(flowers102_annotations / name, root / name)
    labels = loadmat(root / "imagelabels.mat")["labels"][0]
    ids = loadmat(root / "setid.mat")
    for key, most in (("trnid", 2), ("valid", 1)):
        drawn: Counter[int] = Counter()
        for number in map(int, ids[key][0]):
            if (drawn[labels[number - 1]]) < most:
                drawn[labels[number - 1]] += 1
                draw(root / "jpg" / f"image_{number:05}.jpg")
    for number in map(int, ids["tstid"][0][:5]):
        draw(root / "jpg" / f"image_{number:05}.jpg")
    return root


@pytest.fixture(scope="module")
def found(folder: Path) -> DataSet:
    return data.read_dataset(folder.parent, skip_missing=True)


@pytest.mark.data
class TestOfficialLists:
    """Everything here needs the real lists: torchvision checks their checksums."""

    def test_all_three_splits_are_the_official_ones(self, found: DataSet) -> None:
        assert (found.layout, found.crop, found.num_classes) == ("flowers", None, 102)
        assert (len(found.train), len(found.val), len(found.test)) == (204, 102, 5)
        assert len(found.skipped) == 8189 - 311

    def test_labels_are_the_files_own_and_names_torchvisions(self, folder: Path, found: DataSet) -> None:
        labels = loadmat(folder / "imagelabels.mat")["labels"][0]
        assert all(s.label == labels[int(s.path.stem[6:]) - 1] - 1 for s in [*found.train, *found.val, *found.test])
        assert found.class_names == Flowers102.classes
        # image_00001.jpg is of label 77
        assert found.class_names[76] == "passion flower"

    def test_it_agrees_with_torchvision(self, folder: Path, found: DataSet) -> None:
        theirs = Flowers102(folder.parent, split="val")
        expected = {(p, label) for p, label in zip(theirs._image_files, theirs._labels, strict=True) if p.is_file()}
        assert {(s.path, s.label) for s in found.val} == expected

    def test_missing_images_are_listed(self, folder: Path) -> None:
        with pytest.raises(UsageError, match=r"7,878 of 8,189 listed images are missing: jpg/image_"):
            data.read_dataset(folder)

    def test_other_lists_of_these_names_are_an_error(self, tmp_path: Path, flowers102_annotations: Path) -> None:
        (tmp_path / "jpg").mkdir()
        for name in LISTS:
            shutil.copy(flowers102_annotations / "setid.mat", tmp_path / name)
        with pytest.raises(UsageError, match="damaged or not the official ones") as caught:
            data.read_dataset(tmp_path)
        assert "download" not in str(caught.value)


@pytest.mark.parametrize("absent", LISTS)
def test_an_absent_list_is_named(tmp_path: Path, absent: str) -> None:
    (tmp_path / "jpg").mkdir()
    for name in LISTS:
        if name != absent:
            (tmp_path / name).touch()
    with pytest.raises(UsageError, match=f"Oxford Flowers-102 but lacks {absent}; put"):
        data.read_dataset(tmp_path)


def test_lists_without_images_are_recognised(tmp_path: Path) -> None:
    for name in LISTS:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="Oxford Flowers-102 but lacks jpg/; put"):
        data.read_dataset(tmp_path)
