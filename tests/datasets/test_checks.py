"""What is wrong with files is found before the first epoch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from opal_deploy.datasets import checks
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import UsageError
from tests.datasets.layouts import draw, write_class_folders, write_cub


class TestUnreadableFiles:
    def test_they_are_left_out_and_named(self, tmp_path: Path) -> None:
        write_class_folders(tmp_path)
        (tmp_path / "a" / "zero.jpg").touch()
        (tmp_path / "b" / "text.jpg").write_text("hello")
        found = read_dataset(tmp_path)
        assert {path.name for path in found.skipped} == {"zero.jpg", "text.jpg"}
        assert found.summary()["skipped"] == 2
        (line,) = found.warnings
        assert "a/zero.jpg (zero bytes)" in line
        assert "b/text.jpg (no decoder recognises it as an image)" in line
        assert len(found.train) + len(found.val) == 10

    def test_only_the_first_twenty_are_spelled_out(self, tmp_path: Path) -> None:
        write_class_folders(tmp_path)
        for index in range(25):
            (tmp_path / "a" / f"bad{index:02}.jpg").touch()
        (line,) = read_dataset(tmp_path).warnings
        assert line.count("zero bytes") == 20
        assert "and 5 more" in line

    def test_a_class_with_nothing_left_is_an_error(self, tmp_path: Path) -> None:
        write_class_folders(tmp_path)
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "zero.jpg").touch()
        with pytest.raises(UsageError, match="no training image is left of c"):
            read_dataset(tmp_path)


class TestMissingImages:
    """Listed, but not there."""

    def _few_missing(self, root: Path, *names: str) -> Path:
        for name in names:
            (write_cub(root) if not (root / "images.txt").exists() else root).joinpath("images", name).unlink()
        return root

    def test_all_are_named_with_the_option_that_leaves_them_out(self, tmp_path: Path) -> None:
        self._few_missing(tmp_path, "001.Auk/3.png", "002.Jay/3.png")
        with pytest.raises(UsageError, match=r"2 of 8 listed .* missing: images/001.Auk/3.png, .*skip-missing"):
            read_dataset(tmp_path)

    def test_skip_missing_leaves_them_out_with_a_warning(self, tmp_path: Path) -> None:
        self._few_missing(tmp_path, "002.Jay/3.png")
        found = read_dataset(tmp_path, skip_missing=True)
        assert len(found.test) == 1
        assert found.skipped == [tmp_path / "images" / "002.Jay" / "3.png"]
        assert "1 of 8 listed images is missing and left out: images/002.Jay/3.png" in found.warnings

    def test_a_class_whose_training_images_are_all_missing_is_an_error(self, tmp_path: Path) -> None:
        self._few_missing(tmp_path, *(f"002.Jay/{i}.png" for i in range(3)))
        with pytest.raises(UsageError, match=r"no training image is left of 002.Jay"):
            read_dataset(tmp_path, skip_missing=True)

    def test_what_is_refused_as_missing_is_not_called_empty_as_well(self, tmp_path: Path) -> None:
        self._few_missing(tmp_path, *(f"002.Jay/{i}.png" for i in range(3)))
        with pytest.raises(UsageError) as caught:
            read_dataset(tmp_path)
        assert "is left" not in str(caught.value)

    def test_an_official_validation_split_with_nothing_left_is_an_error(self, tmp_path: Path) -> None:
        write_class_folders(tmp_path / "train")
        for name in "ab":
            (tmp_path / "val" / name).mkdir(parents=True)
            (tmp_path / "val" / name / "0.png").write_text("hello")
        with pytest.raises(UsageError, match="no validation image is left"):
            read_dataset(tmp_path)

    def test_a_test_split_that_is_missing_altogether_is_a_warning(self, tmp_path: Path) -> None:
        self._few_missing(tmp_path, "001.Auk/3.png", "002.Jay/3.png")
        found = read_dataset(tmp_path, skip_missing=True)
        assert "no test image is left" in found.warnings

    def test_what_else_is_wrong_is_named_with_them(self, tmp_path: Path) -> None:
        self._few_missing(tmp_path, "001.Auk/3.png")
        images = tmp_path / "images"
        (images / "002.Jay" / "0.png").write_text("hello")
        (images / "002.Jay" / "new.png").write_text("hello")
        shutil.copy(images / "001.Auk" / "1.png", images / "001.Auk" / "2.png")
        with pytest.raises(UsageError) as caught:
            read_dataset(tmp_path)
        message = str(caught.value)
        assert "1 of 8 listed images is missing: images/001.Auk/3.png" in message
        assert "images/002.Jay/0.png (no decoder recognises it as an image)" in message
        assert "1 image is in no list and not used: images/002.Jay/new.png" in message
        assert "images/001.Auk/1.png = images/001.Auk/2.png" in message
        assert "\n" not in message


class TestUnlistedImages:
    """There, but in no list."""

    def test_they_are_a_warning(self, tmp_path: Path) -> None:
        write_cub(tmp_path)
        draw(tmp_path / "images" / "001.Auk" / "extra.jpg")
        draw(tmp_path / "images" / ".thumbnails" / "0.jpg")
        draw(tmp_path / "images" / "._0.jpg")
        (tmp_path / "images" / "notes.txt").write_text("no image")
        (line,) = read_dataset(tmp_path).warnings
        assert line == "1 image is in no list and not used: images/001.Auk/extra.jpg"


class TestDoubledImages:
    """One image twice, as a file or as a line."""

    def _data(self, root: Path, **splits: list[tuple[str, int]]) -> DataSet:
        samples = {name: [Sample(root / file, label) for file, label in pairs] for name, pairs in splits.items()}
        return DataSet(root, "", ["Auk", "Jay"], samples["train"], samples.get("val", []), samples.get("test", []))

    def _twins(self, root: Path) -> None:
        draw(root / "a.png")
        shutil.copy(root / "a.png", root / "b.png")
        draw(root / "c.png")

    def test_different_images_are_no_warning(self, tmp_path: Path) -> None:
        self._twins(tmp_path)
        assert checks.duplicate_warnings(self._data(tmp_path, train=[("a.png", 0), ("c.png", 0)])) == []

    @pytest.mark.parametrize(
        ("splits", "expected"),
        [
            (
                {"train": [("a.png", 0), ("c.png", 0), ("b.png", 0)]},
                ["1 pair of images is listed twice or byte-identical, in one split and class: a.png = b.png"],
            ),
            (
                {"train": [("c.png", 0), ("c.png", 0)]},
                ["1 pair of images is listed twice or byte-identical, in one split and class: c.png = c.png"],
            ),
            (
                {"train": [("a.png", 0)], "test": [("b.png", 0)]},
                [
                    "1 pair of images is listed or byte-identical in two splits, so that one is measured on what "
                    "another has seen: a.png (train) = b.png (test)"
                ],
            ),
            (
                {"train": [("c.png", 0)], "val": [("c.png", 0)]},
                [
                    "1 pair of images is listed or byte-identical in two splits, so that one is measured on what "
                    "another has seen: c.png (train) = c.png (val)"
                ],
            ),
            (
                {"train": [("a.png", 0), ("b.png", 1)]},
                ["1 pair of images is listed or byte-identical with two labels: a.png (Auk) = b.png (Jay)"],
            ),
        ],
        ids=["files in one class", "lines in one class", "files in two splits", "lines in two splits", "two labels"],
    )
    def test_each_kind_says_what_it_is(
        self, tmp_path: Path, splits: dict[str, list[tuple[str, int]]], expected: list[str]
    ) -> None:
        self._twins(tmp_path)
        assert checks.duplicate_warnings(self._data(tmp_path, **splits)) == expected

    def test_two_splits_and_two_labels_are_two_warnings(self, tmp_path: Path) -> None:
        self._twins(tmp_path)
        lines = checks.duplicate_warnings(self._data(tmp_path, train=[("a.png", 0)], test=[("b.png", 1)]))
        assert ["two splits" in line for line in lines] == [True, False]
        assert "two labels" in lines[1]

    def test_they_are_looked_for_after_validation_was_set_aside(self, tmp_path: Path) -> None:
        write_class_folders(tmp_path, count=5)
        for index in range(1, 5):
            shutil.copy(tmp_path / "a" / "0.png", tmp_path / "a" / f"{index}.png")
        found = read_dataset(tmp_path)
        assert any("a/" in line and "(val)" in line for line in found.warnings)

    def test_files_alike_in_length_and_first_4_kb_are_compared_in_full(self, tmp_path: Path) -> None:
        start = b"x" * 5000
        paths = [tmp_path / name for name in "abcde"]
        contents = (start + b"1", start + b"2", start + b"1", b"y" + start, b"short")
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        assert checks.find_identical_files(paths) == [[paths[0], paths[2]]]

    def test_unlike_files_are_not_read_in_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in "abc":
            (tmp_path / name).write_bytes(name.encode() * 5000)
        monkeypatch.setattr(checks, "_hash_file", lambda path: pytest.fail(f"read {path} in full"))
        assert checks.find_identical_files([tmp_path / name for name in "abc"]) == []


def test_files_are_looked_at_a_few_at_a_time_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CHUNK_SIZE", 3)
    assert list(checks.map_in_threads(lambda n: n * n, range(10))) == [n * n for n in range(10)]
