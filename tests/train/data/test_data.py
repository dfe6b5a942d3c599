"""Data sets are read, checked and split before the first epoch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.model_selection import StratifiedShuffleSplit

from opal_deploy.errors import UsageError
from opal_deploy.train.data import catalogue as data
from opal_deploy.train.data import cub


def _picture(path: Path, size: tuple[int, int] = (16, 12)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (10, 20, 30)).save(path)
    return path


def _classes(root: Path, names: str = "ab", count: int = 5) -> Path:
    for name in names:
        for index in range(count):
            _picture(root / name / f"{index}.png")
    return root


def _write_cub(root: Path, lines: dict[str, list[str]] | None = None) -> Path:
    """Two classes with three training and one test picture each."""
    names = [f"{c}/{i}.png" for c in ("001.Auk", "002.Jay") for i in range(4)]
    for name in names:
        _picture(root / "images" / name)
    tables = {
        "images.txt": [f"{i} {name}" for i, name in enumerate(names, 1)],
        "image_class_labels.txt": [f"{i} {1 + (i > 4)}" for i in range(1, 9)],
        "train_test_split.txt": [f"{i} {int(i % 4 != 0)}" for i in range(1, 9)],
        "bounding_boxes.txt": [f"{i} 2.0 3.0 10.0 8.0" for i in range(1, 9)],
        "classes.txt": ["1 001.Auk", "2 002.Jay"],
    }
    for file, content in {**tables, **(lines or {})}.items():
        (root / file).write_text("\n".join(content) + "\n")
    return root


class TestImageFolder:
    def test_classes_are_the_folders_sorted_by_name(self, tmp_path: Path) -> None:
        found = data.read(_classes(tmp_path, "cab"))
        assert found.class_names == ["a", "b", "c"]
        assert all(sample.path.parent.name == found.class_names[sample.label] for sample in found.train)

    def test_extensions_count_in_any_case_and_hidden_files_do_not(self, tmp_path: Path) -> None:
        _classes(tmp_path)
        _picture(tmp_path / "a" / "UPPER.PNG")
        _picture(tmp_path / "a" / "deeper" / "photo.JPeG")
        _picture(tmp_path / "a" / "._photo.jpg")
        (tmp_path / "a" / "notes.txt").write_text("no picture")
        found = data.read(tmp_path)
        names = {s.path.name for s in [*found.train, *found.val] if s.label == 0}
        assert names == {"0.png", "1.png", "2.png", "3.png", "4.png", "UPPER.PNG", "photo.JPeG"}

    @pytest.mark.parametrize("val_name", ["val", "valid", "validation"])
    def test_split_folders_are_taken_as_they_are(self, tmp_path: Path, val_name: str) -> None:
        _classes(tmp_path / "train", count=4)
        _classes(tmp_path / val_name, count=2)
        _classes(tmp_path / "test", count=3)
        found = data.read(tmp_path)
        assert (len(found.train), len(found.val), len(found.test)) == (8, 4, 6)

    def test_without_val_a_fifth_of_each_class_is_set_aside(self, tmp_path: Path) -> None:
        _classes(tmp_path / "train", count=10)
        found = data.read(tmp_path)
        assert [s.label for s in found.val] == [0, 0, 1, 1]
        assert not {s.path for s in found.train} & {s.path for s in found.val}
        assert found.test == []

    def test_a_class_may_be_called_train(self, tmp_path: Path) -> None:
        for name in ("train", "bus"):
            _classes(tmp_path, [name], count=5)  # type: ignore[arg-type]
        assert data.read(tmp_path).class_names == ["bus", "train"]

    def test_test_classes_unknown_to_train_are_an_error(self, tmp_path: Path) -> None:
        _classes(tmp_path / "train")
        _classes(tmp_path / "test", "abz")
        with pytest.raises(UsageError, match=r"classes in test/ that train/ does not have: z"):
            data.read(tmp_path)

    def test_val_without_train_is_an_error(self, tmp_path: Path) -> None:
        _classes(tmp_path / "val")
        with pytest.raises(UsageError, match="has val/ but no train/"):
            data.read(tmp_path)

    def test_all_problems_come_in_one_line(self, tmp_path: Path) -> None:
        _classes(tmp_path / "train", "a")
        (tmp_path / "train" / "empty").mkdir()
        _classes(tmp_path / "test", "q")
        with pytest.raises(UsageError) as caught:
            data.read(tmp_path)
        message = str(caught.value)
        assert "without pictures: empty" in message
        assert "does not have: q" in message
        assert "\n" not in message

    @pytest.mark.parametrize("make", [lambda p: p, lambda p: _classes(p, "a")], ids=["no class", "one class"])
    def test_fewer_than_two_classes_are_an_error(self, tmp_path: Path, make: Any) -> None:
        with pytest.raises(UsageError, match="at least 2 are needed"):
            data.read(make(tmp_path))

    def test_a_missing_folder_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no such folder"):
            data.read(tmp_path / "nowhere")


class TestUnreadableFiles:
    def test_they_are_left_out_and_named(self, tmp_path: Path) -> None:
        _classes(tmp_path)
        (tmp_path / "a" / "zero.jpg").touch()
        (tmp_path / "b" / "text.jpg").write_text("hello")
        found = data.read(tmp_path)
        assert {path.name for path in found.skipped} == {"zero.jpg", "text.jpg"}
        assert found.summary()["skipped"] == 2
        (line,) = found.warnings
        assert "a/zero.jpg (zero bytes)" in line
        assert "b/text.jpg (no decoder recognises it as an image)" in line
        assert len(found.train) + len(found.val) == 10

    def test_only_the_first_twenty_are_spelled_out(self, tmp_path: Path) -> None:
        _classes(tmp_path)
        for index in range(25):
            (tmp_path / "a" / f"bad{index:02}.jpg").touch()
        (line,) = data.read(tmp_path).warnings
        assert line.count("zero bytes") == 20
        assert "and 5 more" in line

    def test_a_class_with_nothing_left_is_an_error(self, tmp_path: Path) -> None:
        _classes(tmp_path)
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "zero.jpg").touch()
        with pytest.raises(UsageError, match="no training picture is left of c"):
            data.read(tmp_path)


class TestStratifiedSplit:
    def test_it_is_scikit_learns_with_the_authors_seed(self) -> None:
        labels = [int(v) for v in np.random.default_rng(3).integers(0, 4, 200)]
        train, val = data.stratified_split(labels, list("abcd"))
        splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=42)
        expected_train, expected_val = next(splitter.split(np.zeros(200), labels))
        assert set(train) == set(expected_train)
        assert set(val) == set(expected_val)

    def test_a_class_with_one_picture_is_named(self) -> None:
        with pytest.raises(UsageError, match="classes with a single picture: lonely; add pictures"):
            data.stratified_split([0] * 10 + [1], ["many", "lonely"])

    def test_fewer_validation_pictures_than_classes_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="6 pictures are too few for 3 classes"):
            data.stratified_split([0, 0, 1, 1, 2, 2], ["a", "b", "c"])


class TestCub:
    def test_split_flag_one_means_training_and_boxes_are_corners(self, tmp_path: Path) -> None:
        found = cub.read(_write_cub(tmp_path))
        assert (len(found.train), len(found.test)) == (6, 2)
        assert [s.path.name for s in found.test] == ["3.png", "3.png"]
        assert found.class_names == ["001.Auk", "002.Jay"]
        assert found.crop == "boxes"
        assert {s.box for s in found.train} == {(2.0, 3.0, 12.0, 11.0)}

    @pytest.mark.parametrize(
        ("file", "lines", "message"),
        [
            ("images.txt", ["1 001.Auk/0.png"], r"7 ids of image_class_labels.txt are not in images.txt: 2, 3"),
            ("image_class_labels.txt", ["1 1"], r"7 ids of images.txt are not in image_class_labels.txt: 2, 3"),
            ("image_class_labels.txt", [f"{i} {i}" for i in range(1, 9)], "classes.txt does not name: 3, 4"),
            ("train_test_split.txt", [f"{i} {i % 3}" for i in range(1, 9)], "holds 2 beside 0 and 1"),
            ("train_test_split.txt", [f"{i} {int(i < 5)}" for i in range(1, 9)], "without a training picture: 002"),
            ("images.txt", ["0, 001.Auk/0.png"], "line 1: '0, 001.Auk/0.png' is not CUB's format"),
            ("bounding_boxes.txt", ["1 2 3 4 wide"], "is not CUB's format"),
            ("bounding_boxes.txt", [], "the table is empty"),
        ],
        ids=["ids without image", "images without label", "unknown class", "third flag", "class without training",
             "comma-separated relative", "box of words", "empty table"],
    )  # fmt: skip
    def test_tables_that_disagree_are_named(self, tmp_path: Path, file: str, lines: list[str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            cub.read(_write_cub(tmp_path, {file: lines}))

    def test_missing_pictures_are_listed(self, tmp_path: Path) -> None:
        _write_cub(tmp_path)
        (tmp_path / "images" / "002.Jay" / "1.png").unlink()
        with pytest.raises(UsageError, match=r"1 pictures of images.txt are not in images/: 002.Jay/1.png"):
            data.read(tmp_path)

    def test_a_missing_table_is_named(self, tmp_path: Path) -> None:
        _write_cub(tmp_path)
        (tmp_path / "bounding_boxes.txt").unlink()
        with pytest.raises(UsageError, match=r"lacks bounding_boxes.txt"):
            data.read(tmp_path)

    def test_a_box_beside_the_picture_is_found_at_the_start(self, tmp_path: Path) -> None:
        boxes = [f"{i} {900 if i == 2 else 0} 0 9 9" for i in range(1, 9)]
        _write_cub(tmp_path, {"bounding_boxes.txt": boxes})
        # one of three training pictures of a class goes; the split then needs a validation folder's worth of others
        listing = data._without_unreadable(cub.read(tmp_path))
        assert [path.name for path in listing.skipped] == ["1.png"]
        assert "has no pixel of the 16x12 picture" in listing.warnings[0]

    @pytest.mark.data
    def test_cub_mini_has_its_official_split(self, cub_mini: Path) -> None:
        found = data.read(cub_mini)
        assert (len(found.train) + len(found.val), len(found.val), len(found.test)) == (300, 60, 243)
        assert found.num_classes == 10
        assert found.class_names[0] == "001.Black_footed_Albatross"
        assert all(sample.box is not None for sample in found.train)
        first = next(s for s in found.test if s.path.name == "Black_Footed_Albatross_0046_18.jpg")
        assert first.box == (60.0, 27.0, 385.0, 331.0)
        assert found.warnings == []

    @pytest.mark.data
    def test_full_tables_with_few_images_list_what_is_missing(self, cub_metadata_full: Path, tmp_path: Path) -> None:
        for table in cub_metadata_full.glob("*.txt"):
            shutil.copy(table, tmp_path / table.name.replace(".first2889", ""))
        with pytest.raises(UsageError) as caught:
            data.read(tmp_path)
        message = str(caught.value)
        assert "8,899 ids of image_class_labels.txt are not in images.txt: 2890" in message
        assert "2,889 pictures of images.txt are not in images/" in message
        assert len(message) < 6000
