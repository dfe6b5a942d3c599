"""torchvision reads official lists wherever they lie, and leaves nothing behind."""

import importlib.util
import tempfile
from pathlib import Path

import pytest

from opal_deploy.datasets.listing import read_matlab
from opal_deploy.datasets.torchvision_datasets import read_with_torchvision
from opal_deploy.errors import MissingExtra

SPLITS = {split: {"split": split} for split in ("train", "val", "test")}


@pytest.mark.parametrize("relative", [False, True])
def test_paths_are_the_users(relative, tmp_path, monkeypatch):
    """Lists of images that do not even exist, in folders of other names."""
    monkeypatch.chdir(tmp_path)
    root = Path() if relative else tmp_path
    for folder in ("lists", "images", "temporary"):
        (root / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for split in SPLITS:
        (root / "lists" / f"{split}1.txt").write_text(f"woven/{split}.jpg\n")
    links = {"dtd/dtd/labels": root / "lists", "dtd/dtd/images": root / "images"}
    val = read_with_torchvision(root, "DTD", links, SPLITS)["val"]
    assert (val.pairs, val.classes) == ([(root / "images" / "woven" / "val.jpg", 0)], ["woven"])
    assert list((root / "temporary").iterdir()) == []
    assert all(path.is_dir() for path in links.values())


def test_without_scipy_the_extra_is_named(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else find_spec(name))
    with pytest.raises(MissingExtra, match=r"needs scipy.*opal-deploy\[train\]"):
        read_matlab(tmp_path / "setid.mat")
