"""Describable Textures: ten official partitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets import DTD

from opal_deploy.datasets import registry as data
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError

Make = Callable[..., Path]

SPLITS = ("train", "val", "test")


@pytest.fixture
def folder(tmp_path: Path, draw: Make) -> Path:
    """Two textures of six images; partition p starts with image p - 1."""
    root = tmp_path / "dtd" / "dtd"
    (root / "labels").mkdir(parents=True)
    for name in ("woven", "banded"):
        for i in range(6):
            draw(root / "images" / name / f"{name}_{i:04}.jpg")
    for partition in range(1, 11):
        for start, split in enumerate(SPLITS):
            numbers = [(partition - 1 + 2 * start + i) % 6 for i in range(2)]
            _list(root, split, partition, [f"{n}/{n}_{i:04}.jpg" for n in ("woven", "banded") for i in numbers])
    return root


def _list(root: Path, split: str, partition: int, names: list[str]) -> None:
    (root / "labels" / f"{split}{partition}.txt").write_text("".join(f"{name}\n" for name in names))


def _numbers(samples: list[Sample]) -> set[int]:
    return {int(sample.path.stem[-4:]) for sample in samples}


@pytest.mark.parametrize(("partition", "expected"), [(1, ({0, 1}, {2, 3}, {4, 5})), (10, ({3, 4}, {5, 0}, {1, 2}))])
def test_splits_are_the_partitions(folder: Path, partition: int, expected: tuple[set[int], ...]) -> None:
    found = data.read_dataset(folder, partition=partition)
    assert found.layout == "dtd"
    assert (_numbers(found.train), _numbers(found.val), _numbers(found.test)) == expected
    assert found.warnings == []


def test_the_first_partition_is_the_default(folder: Path) -> None:
    assert _numbers(data.read_dataset(folder).train) == {0, 1}


def test_classes_are_sorted_by_name_and_labels_follow(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert found.class_names == ["banded", "woven"]
    assert all(s.path.parent.name == found.class_names[s.label] for s in [*found.train, *found.val, *found.test])


@pytest.mark.parametrize("levels", [0, 1, 2], ids=["the archive's folder", "its parent", "torchvision's root"])
def test_torchvisions_root_and_what_is_below_it_will_do(folder: Path, levels: int) -> None:
    assert data.read_dataset([folder, *folder.parents][levels]).root == folder


def test_it_agrees_with_torchvision(folder: Path) -> None:
    theirs = DTD(folder.parent.parent, split="test", partition=3)
    ours = data.read_dataset(folder, partition=3)
    assert [(s.path, s.label) for s in ours.test] == list(zip(theirs._image_files, theirs._labels, strict=True))


def test_an_absent_partition_is_named(folder: Path) -> None:
    (folder / "labels" / "val7.txt").unlink()
    with pytest.raises(UsageError, match=r"Describable Textures but lacks labels/val7.txt"):
        data.read_dataset(folder, partition=7)


def test_splits_of_different_textures_are_an_error(folder: Path) -> None:
    _list(folder, "test", 1, ["woven/woven_0004.jpg"])
    with pytest.raises(UsageError, match=r"other textures than in labels/train1.txt are in labels/test1.txt"):
        data.read_dataset(folder)


def test_a_damaged_list_is_an_error(folder: Path) -> None:
    _list(folder, "val", 1, ["woven_0002.jpg"])
    with pytest.raises(UsageError, match="its lists for val are damaged"):
        data.read_dataset(folder)
