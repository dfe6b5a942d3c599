"""What is wrong with files is found before the first epoch."""

import shutil

import pytest

from opal_deploy.datasets import checks
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import UsageError
from tests.datasets.layouts import draw, write_class_folders, write_cub, write_lines


def test_unreadable_files_are_left_out_and_named_up_to_the_twentieth(tmp_path):
    write_class_folders(tmp_path)
    (tmp_path / "a" / "zero.jpg").touch()
    (tmp_path / "b" / "text.jpg").write_text("hello")
    (tmp_path / "b" / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF")
    found = read_dataset(tmp_path)
    assert {path.name for path in found.skipped} == {"zero.jpg", "text.jpg", "cut.jpg"}
    assert found.summary()["skipped"] == 3
    (line,) = found.warnings
    assert "a/zero.jpg (the file has zero bytes)" in line
    assert "b/cut.jpg (its JPEG data ends early; copy or download the file again)" in line
    assert "b/text.jpg (no decoder recognises it as an image)" in line
    assert len(found.train) + len(found.val) == 10
    for index in range(25):
        (tmp_path / "a" / f"bad{index:02}.jpg").touch()
    (line,) = read_dataset(tmp_path).warnings
    assert line.count("zero bytes") == 20
    assert "and 8 more" in line


AUK, JAY = "001.Auk/3.png", "002.Jay/3.png"
JAYS_TO_TRAIN_ON = tuple(f"002.Jay/{i}.png" for i in range(3))


def write_cub_without(root, *names):
    write_cub(root)
    for name in names:
        (root / "images" / name).unlink()


def test_missing_images_are_named_with_all_else(tmp_path):
    write_cub_without(tmp_path, AUK, JAY)
    images = tmp_path / "images"
    (images / "002.Jay" / "0.png").write_text("hello")
    shutil.copy(images / "001.Auk" / "1.png", images / "001.Auk" / "2.png")
    with pytest.raises(UsageError) as caught:
        read_dataset(tmp_path)
    for part in (f"2 listed images missing: images/{AUK}", "images/002.Jay/0.png (", "1.png = images/001.Auk/2.png"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def _write_an_unreadable_validation_split(root):
    write_class_folders(root / "train")
    for name in "ab":
        write_lines(root / "val" / name / "0.png", ["hello"])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda root: write_lines(write_class_folders(root) / "c" / "zero.jpg", []), "training image: c"),
        (lambda root: write_cub_without(root, *JAYS_TO_TRAIN_ON), r"training image: 002\.Jay"),
        (_write_an_unreadable_validation_split, "no validation image is left"),
    ],
    ids=["an unreadable class", "a missing class", "an unreadable validation split"],
)
def test_a_class_or_validation_split_with_nothing_left_is_an_error(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(UsageError, match=message):
        read_dataset(tmp_path)


class TestDoubledImages:
    """One image twice, as a file or as a line."""

    @pytest.mark.parametrize(
        ("splits", "expected"),
        [
            ({"train": ["a Auk", "c Auk"]}, []),
            ({"train": ["a Auk", "c Auk", "b Auk"]}, ["in one split and class: a.png = b.png"]),
            ({"train": ["c Auk", "c Auk"]}, ["in one split and class: c.png = c.png"]),
            ({"train": ["a Auk"], "test": ["b Auk"]}, ["biases results: a.png (train) = b.png (test)"]),
            ({"train": ["a Auk", "b Jay"]}, ["with two labels: a.png (Auk) = b.png (Jay)"]),
        ],
        ids=["different", "one class", "one line twice", "two splits", "two labels"],
    )
    def test_each_kind_says_what_it_is(self, tmp_path, splits, expected):
        """Of `a` and `b`, which are one image, and `c`, which is another."""
        draw(tmp_path / "a.png")
        shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
        draw(tmp_path / "c.png")
        names = ["Auk", "Jay"]
        train, val, test = (
            [Sample(tmp_path / f"{line[0]}.png", names.index(line[2:])) for line in splits.get(split, [])]
            for split in ("train", "val", "test")
        )
        lines = checks.duplicate_warnings(DataSet(tmp_path, "", names, train, val, test))
        assert [line.endswith(end) for line, end in zip(lines, expected, strict=True)] == [True] * len(expected)

    def test_they_are_looked_for_after_validation_was_set_aside(self, tmp_path):
        write_class_folders(tmp_path, count=5)
        for index in range(1, 5):
            shutil.copy(tmp_path / "a" / "0.png", tmp_path / "a" / f"{index}.png")
        found = read_dataset(tmp_path)
        assert any("a/" in line and "(val)" in line for line in found.warnings)
