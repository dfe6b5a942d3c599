"""Caltech-101, which has no official split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets import Caltech101

from opal_deploy.datasets import registry as data
from opal_deploy.errors import UsageError

Make = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, draw: Make) -> Path:
    """Two classes of ten images and the background."""
    root = tmp_path / "caltech101"
    for name in ("accordion", "Faces", "BACKGROUND_Google"):
        for i in range(1, 11):
            draw(root / "101_ObjectCategories" / name / f"image_{i:04}.jpg")
    return root


def test_a_stratified_fifth_is_tested_on_and_said_to_be_no_official_split(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert found.layout == "caltech101"
    assert sorted(s.label for s in found.test) == [0, 0, 1, 1]
    assert (len(found.train), len(found.val)) == (12, 4)
    (line,) = found.warnings
    assert line.startswith("Caltech-101 has no official split: a stratified 20% of each class is tested on (seed 42)")


def test_splits_do_not_overlap_and_are_the_same_again(folder: Path) -> None:
    found, again = data.read_dataset(folder), data.read_dataset(folder)
    assert len({s.path for s in [*found.train, *found.val, *found.test]}) == 20
    assert (found.train, found.val, found.test) == (again.train, again.val, again.test)


def test_the_background_is_no_class(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert found.class_names == ["Faces", "accordion"]
    assert all(s.path.parent.name == found.class_names[s.label] for s in [*found.train, *found.val, *found.test])


def test_classes_and_images_are_torchvisions(folder: Path) -> None:
    theirs = Caltech101(folder.parent)
    expected = {(theirs.categories[y], f"image_{i:04}.jpg", y) for i, y in zip(theirs.index, theirs.y, strict=True)}
    found = data.read_dataset(folder.parent)
    assert found.class_names == theirs.categories
    everything = [*found.train, *found.val, *found.test]
    assert {(s.path.parent.name, s.path.name, s.label) for s in everything} == expected


def test_a_stray_file_names_no_image_that_is_not_there(folder: Path) -> None:
    (folder / "101_ObjectCategories" / "Faces" / "Thumbs.db").touch()
    (folder / "101_ObjectCategories" / ".DS_Store").touch()
    assert data.read_dataset(folder).skipped == []


def test_a_gap_in_the_numbers_is_a_missing_image(folder: Path) -> None:
    (folder / "101_ObjectCategories" / "Faces" / "image_0003.jpg").unlink()
    with pytest.raises(UsageError, match=r"1 of 20 listed images is missing: 101_ObjectCategories/Faces/image_0003"):
        data.read_dataset(folder)


def test_images_of_other_names_are_unlisted(folder: Path, draw: Make) -> None:
    draw(folder / "101_ObjectCategories" / "Faces" / "me.jpg")
    assert any(
        "in no list and not used: 101_ObjectCategories/Faces/me.jpg" in w for w in data.read_dataset(folder).warnings
    )


def test_a_class_with_a_single_image_is_an_error(folder: Path, draw: Make) -> None:
    draw(folder / "101_ObjectCategories" / "lonely" / "image_0001.jpg")
    with pytest.raises(UsageError, match="no test split possible, classes with a single image: lonely; unpack"):
        data.read_dataset(folder)
