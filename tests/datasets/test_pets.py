"""Oxford-IIIT Pets: the official lists, and the oddities of the archive."""

from __future__ import annotations

import builtins
import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchvision.datasets import OxfordIIITPet

from opal_deploy.datasets import registry as data
from opal_deploy.errors import UsageError

Make = Callable[..., Path]

# in the order of the class ids, which is not that of upper and lower case letters
BREEDS = ["Abyssinian", "american_bulldog", "Bengal"]


@pytest.fixture
def folder(tmp_path: Path, draw: Make) -> Path:
    """Three breeds with five images to train on and one to test each."""
    root = tmp_path / "oxford-iiit-pet"
    (root / "annotations").mkdir(parents=True)
    for split, numbers in (("trainval", range(1, 6)), ("test", range(6, 7))):
        rows = [(f"{breed}_{i}", class_id) for class_id, breed in enumerate(BREEDS, 1) for i in numbers]
        for name, _ in rows:
            draw(root / "images" / f"{name}.jpg")
        _list(root, split, rows)
    return root


def _list(root: Path, split: str, rows: list[tuple[str, int]]) -> None:
    lines = [f"{name} {class_id} {1 if name[0].isupper() else 2} 1\n" for name, class_id in rows]
    (root / "annotations" / f"{split}.txt").write_text("".join(lines))


def test_trainval_is_trained_on_and_test_is_tested_on(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert (found.layout, found.crop) == ("pets", None)
    assert (len(found.train), len(found.val), len(found.test)) == (12, 3, 3)
    assert [(s.path, s.label) for s in found.test] == [
        (folder / "images" / f"{breed}_6.jpg", label) for label, breed in enumerate(BREEDS)
    ]
    assert found.warnings == []


def test_class_names_are_in_the_order_of_the_class_ids(folder: Path) -> None:
    assert data.read_dataset(folder).class_names == ["Abyssinian", "American Bulldog", "Bengal"]


def test_it_agrees_with_torchvision(folder: Path) -> None:
    theirs = OxfordIIITPet(folder.parent, split="test")
    ours = data.read_dataset(folder.parent)
    assert ours.class_names == theirs.classes
    assert [(s.path, s.label) for s in ours.test] == list(zip(theirs._images, theirs._labels, strict=True))


def test_gif_and_png_called_jpg_are_read_and_mat_files_passed_over(folder: Path, draw: Make) -> None:
    draw(folder / "images" / "Abyssinian_1.jpg", format="GIF")
    draw(folder / "images" / "Abyssinian_6.jpg", format="PNG")
    (folder / "images" / "Abyssinian_101.mat").write_text("stray")
    found = data.read_dataset(folder)
    assert (found.warnings, found.skipped) == ([], [])
    assert len(found.train) + len(found.val) == 15


def test_a_class_id_that_the_list_leaves_out_is_an_error(folder: Path) -> None:
    # else Bengal would be called by the name of the breed before it
    rows = [(f"{breed}_{i}", class_id) for class_id, breed in ((1, "Abyssinian"), (3, "Bengal")) for i in range(1, 6)]
    _list(folder, "trainval", rows)
    with pytest.raises(UsageError, match=r"trainval.txt has no image of the class ids 2; "):
        data.read_dataset(folder)


def test_a_class_id_with_two_breeds_is_an_error(folder: Path) -> None:
    _list(folder, "trainval", [("Abyssinian_1", 1), ("Bengal_1", 1), ("american_bulldog_1", 2)])
    with pytest.raises(UsageError, match=r"trainval.txt has several breeds of the class ids 1 \(Abyssinian, Bengal\)"):
        data.read_dataset(folder)


def test_a_breed_that_is_only_tested_is_an_error(folder: Path) -> None:
    _list(folder, "test", [("Persian_1", 1)])
    with pytest.raises(UsageError, match=r"test.txt has breeds .* does not have under these ids: Persian \(1\)"):
        data.read_dataset(folder)


def test_the_same_breed_under_another_id_in_the_test_list_is_an_error(folder: Path) -> None:
    _list(folder, "test", [("Bengal_6", 1)])
    with pytest.raises(UsageError, match=r"test.txt has breeds .* does not have under these ids: Bengal \(1\)"):
        data.read_dataset(folder)


def test_a_damaged_list_is_an_error(folder: Path) -> None:
    (folder / "annotations" / "test.txt").write_text("Abyssinian_1 1\n")
    with pytest.raises(UsageError, match="its lists for test are damaged"):
        data.read_dataset(folder)


def test_an_unreadable_list_is_called_by_the_users_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.open

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith("trainval.txt"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, *args, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(UsageError) as caught:
        data.read_dataset(folder)
    assert str(folder / "annotations" / "trainval.txt") in str(caught.value)
    assert "opal-deploy-" not in str(caught.value)


def test_an_empty_list_is_an_error(folder: Path) -> None:
    for split in ("trainval", "test"):
        _list(folder, split, [])
    with pytest.raises(UsageError, match="no images to train on"):
        data.read_dataset(folder)


def test_an_absent_list_is_named(folder: Path) -> None:
    (folder / "annotations" / "test.txt").unlink()
    with pytest.raises(UsageError, match=r"lacks annotations/test.txt"):
        data.read_dataset(folder)


@pytest.mark.data
def test_the_real_files_in_a_folder_of_another_name(pets_mini: Path) -> None:
    found = data.read_dataset(pets_mini)
    assert (len(found.train) + len(found.val), len(found.test)) == (259, 112)
    assert found.num_classes == 37
    assert found.class_names[:3] == ["Abyssinian", "American Bulldog", "American Pit Bull Terrier"]
    assert all(s.path.is_relative_to(pets_mini) for s in found.train)
    assert found.warnings == ["1 image is in no list and not used: images/Abyssinian_34.jpg"]


@pytest.mark.data
class TestFullLists:
    """All 7,349 lines beside ten images of each breed."""

    @pytest.fixture
    def full(self, pets_mini: Path, tmp_path: Path) -> Path:
        (tmp_path / "images").symlink_to(pets_mini / "images")
        (tmp_path / "annotations").symlink_to(pets_mini / "annotations_full")
        return tmp_path

    def test_what_is_missing_is_listed(self, full: Path) -> None:
        with pytest.raises(UsageError, match=r"6,978 of 7,349 listed images are missing: images/Abyssinian_1\.jpg"):
            data.read_dataset(full)

    def test_skip_missing_reads_the_rest_under_the_official_split(self, full: Path, pets_mini: Path) -> None:
        found = data.read_dataset(full, skip_missing=True)
        assert len(found.skipped) == 6978
        # nearly all of these photographs are officially for training; annotations/ beside them has a split of its own
        assert [(s.path.name, s.label) for s in found.test] == [("Abyssinian_5.jpg", 0)]
        assert (len(found.train), len(found.val)) == (296, 74)
        assert found.class_names == data.read_dataset(pets_mini).class_names
