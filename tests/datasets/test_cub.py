"""CUB-200-2011's own folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from opal_deploy.datasets import checks
from opal_deploy.datasets import registry as data
from opal_deploy.datasets.cub import CUB
from opal_deploy.errors import UsageError

Make = Callable[..., Path]


class TestCub:
    def test_split_flag_one_means_training_and_boxes_are_corners(self, tmp_path: Path, write_cub: Make) -> None:
        found = CUB.read(write_cub(tmp_path), 1).data
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
            ("train_test_split.txt", [f"{i} {int(i < 5)}" for i in range(1, 9)], "without a training image: 002"),
            ("images.txt", ["0, 001.Auk/0.png"], "line 1: '0, 001.Auk/0.png' is not CUB's format"),
            ("bounding_boxes.txt", ["1 2 3 4 wide"], "is not CUB's format"),
            ("bounding_boxes.txt", [], "the table is empty; unpack the official archive again, or mend its tables"),
            ("bounding_boxes.txt", ["1 2 3 4 nan"], "4 values separated by spaces; unpack the official archive again"),
            ("classes.txt", ["¹ 001.Auk"], "is not CUB's format, a new numeric id and 1 value separated"),
            ("classes.txt", ["1 Auk", "2 Auk"], "several classes of one name in classes.txt: Auk"),
            ("images.txt", ["1 /tmp/a.png", "2 ../a.png"], r"images.txt that lead out of images/: /tmp/a.png, \.\./a"),
        ],
        ids=["ids without image", "images without label", "unknown class", "third flag", "class without training",
             "comma-separated relative", "box of words", "empty table", "no finite box", "superscript",
             "classes of one name", "images elsewhere"],
    )  # fmt: skip
    def test_tables_that_disagree_are_named(
        self, tmp_path: Path, file: str, lines: list[str], message: str, write_cub: Make
    ) -> None:
        with pytest.raises(UsageError, match=message):
            data.read_dataset(write_cub(tmp_path, {file: lines}), "cub")

    def test_missing_images_are_listed(self, tmp_path: Path, write_cub: Make) -> None:
        write_cub(tmp_path)
        (tmp_path / "images" / "002.Jay" / "1.png").unlink()
        with pytest.raises(UsageError, match=r"1 of 8 listed images is missing: images/002.Jay/1.png"):
            data.read_dataset(tmp_path)

    def test_a_missing_table_is_named(self, tmp_path: Path, write_cub: Make) -> None:
        write_cub(tmp_path)
        (tmp_path / "bounding_boxes.txt").unlink()
        with pytest.raises(UsageError, match=r"lacks bounding_boxes.txt"):
            data.read_dataset(tmp_path)

    def test_a_box_beside_the_image_is_found_at_the_start(self, tmp_path: Path, write_cub: Make) -> None:
        boxes = [f"{i} {900 if i == 2 else 0} 0 9 9" for i in range(1, 9)]
        write_cub(tmp_path, {"bounding_boxes.txt": boxes})
        # one of three training images of a class goes; the split then needs a validation folder's worth of others
        listing = checks.check_dataset(CUB.read(tmp_path, 1))
        assert [path.name for path in listing.skipped] == ["1.png"]
        assert "has no pixel of the 16x12 image" in listing.warnings[0]

    @pytest.mark.data
    def test_cub_mini_has_its_official_split(self, cub_mini: Path) -> None:
        found = data.read_dataset(cub_mini)
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
            data.read_dataset(tmp_path)
        message = str(caught.value)
        assert "8,899 ids of image_class_labels.txt are not in images.txt: 2890" in message
        assert "2,889 of 2,889 listed images are missing: images/001.Black_footed_Albatross/" in message
        assert len(message) < 6000

    def test_the_archives_own_parent_will_do(self, tmp_path: Path, write_cub: Make) -> None:
        folder = write_cub(tmp_path / "CUB_200_2011")
        assert data.read_dataset(tmp_path).root == folder

    def test_damaged_tables_come_in_one_line(self, tmp_path: Path, write_cub: Make) -> None:
        write_cub(tmp_path, {"bounding_boxes.txt": ["1 2"], "classes.txt": ["x"]})
        with pytest.raises(UsageError, match=r"bounding_boxes.txt, line 1: .* also, .*classes.txt, line 1: 'x'"):
            data.read_dataset(tmp_path)

    def test_several_problems_come_in_one_line(self, tmp_path: Path, write_cub: Make) -> None:
        write_cub(tmp_path, {"train_test_split.txt": [f"{i} {int(i % 4 != 0)}" for i in range(2, 9)]})
        (tmp_path / "images" / "002.Jay" / "1.png").unlink()
        with pytest.raises(UsageError) as caught:
            data.read_dataset(tmp_path)
        message = str(caught.value)
        assert "1 id of images.txt is not in train_test_split.txt: 1;" in message
        assert "1 of 7 listed images is missing: images/002.Jay/1.png" in message
        assert "\n" not in message

    def test_tables_may_begin_with_a_byte_order_mark(self, tmp_path: Path, write_cub: Make) -> None:
        write_cub(tmp_path)
        for table in tmp_path.glob("*.txt"):
            table.write_text(table.read_text(), encoding="utf-8-sig")
        assert data.read_dataset(tmp_path).class_names == ["001.Auk", "002.Jay"]
