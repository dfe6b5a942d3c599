"""torchvision and SciPy read official lists wherever they lie, and leave nothing behind."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.datasets.listing import read_matlab
from opal_deploy.datasets.torchvision_datasets import read_with_torchvision
from opal_deploy.errors import MissingExtra, UsageError

DTD_SPLITS: dict[str, dict[str, Any]] = {split: {"split": split} for split in ("train", "val", "test")}


@pytest.fixture
def textures(tmp_path: Path) -> dict[str, Path]:
    """Lists of a data set whose images are not even there, under names of the user's own."""
    (tmp_path / "lists").mkdir()
    for split in DTD_SPLITS:
        (tmp_path / "lists" / f"{split}1.txt").write_text(f"woven/{split}.jpg\n")
    (tmp_path / "images").mkdir()
    return {"dtd/dtd/labels": tmp_path / "lists", "dtd/dtd/images": tmp_path / "images"}


def test_paths_are_the_users(tmp_path: Path, textures: dict[str, Path]) -> None:
    found = read_with_torchvision(tmp_path, "DTD", textures, DTD_SPLITS)
    assert found["val"].pairs == [(tmp_path / "images" / "woven" / "val.jpg", 0)]
    assert found["val"].classes == ["woven"]


def test_relative_paths_stay_relative(
    tmp_path: Path, textures: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    links = {name: path.relative_to(tmp_path) for name, path in textures.items()}
    found = read_with_torchvision(Path(), "DTD", links, DTD_SPLITS)
    assert found["train"].pairs == [(Path("images/woven/train.jpg"), 0)]


def test_nothing_is_left_behind(tmp_path: Path, textures: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    read_with_torchvision(tmp_path, "DTD", textures, DTD_SPLITS)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert all(path.is_dir() for path in textures.values())


def test_damaged_lists_of_several_splits_come_in_one_line(tmp_path: Path, textures: dict[str, Path]) -> None:
    for split in ("train", "test"):
        (tmp_path / "lists" / f"{split}1.txt").write_text("no slash\n")
    with pytest.raises(UsageError, match=r"lists for train are damaged.*lists for test are damaged") as caught:
        read_with_torchvision(tmp_path, "DTD", textures, DTD_SPLITS)
    assert "\n" not in str(caught.value)


def test_without_scipy_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else found(name))
    with pytest.raises(MissingExtra, match=r"needs scipy.*opal-deploy\[train\]"):
        read_matlab(tmp_path / "setid.mat")
