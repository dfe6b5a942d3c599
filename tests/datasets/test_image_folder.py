"""Folders of images, one a class."""

import os

import pytest

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from tests.datasets.layouts import deny, draw, write_class_folders


class TestImageFolder:
    def test_classes_are_the_folders_sorted_by_name(self, tmp_path):
        found = read_dataset(write_class_folders(tmp_path, ["train", "bus", "a"]))
        assert found.class_names == ["a", "bus", "train"]
        assert all(sample.path.parent.name == found.class_names[sample.label] for sample in found.train)

    def test_extensions_count_in_any_case_and_hidden_files_do_not(self, tmp_path):
        write_class_folders(tmp_path)
        draw(tmp_path / "a" / "UPPER.PNG")
        draw(tmp_path / "a" / "deeper" / "photo.JPeG")
        draw(tmp_path / "a" / "._photo.jpg")
        (tmp_path / "a" / "notes.txt").write_text("no image")
        found = read_dataset(tmp_path)
        names = {s.path.name for s in [*found.train, *found.val] if s.label == 0}
        assert names == {"0.png", "1.png", "2.png", "3.png", "4.png", "UPPER.PNG", "photo.JPeG"}

    @pytest.mark.parametrize("val_name", ["valid", "validation"])
    def test_split_folders_are_taken_as_they_are(self, tmp_path, val_name):
        for split, count in (("train", 4), (val_name, 2), ("test", 3)):
            write_class_folders(tmp_path / split, count=count)
        found = read_dataset(tmp_path)
        assert (len(found.train), len(found.val), len(found.test)) == (8, 4, 6)

    @pytest.mark.parametrize(
        ("folders", "messages"),
        [
            ([], ["at least 2 are needed"]),
            (["a"], ["at least 2 are needed"]),
            (["val/a", "val/b"], ["found val/ but no train/"]),
            (["train/a", "train/b", "test/a", "test/b", "test/z"], ["classes in test/ that train/ does not have: z"]),
            (["train/a", "train/empty/", "test/q"], ["classes without a training image: empty", "does not have: q"]),
        ],
        ids=["no class", "one class", "val alone", "a class only tested", "several problems"],
    )
    def test_impossible_folders_are_one_line(self, tmp_path, folders, messages):
        for folder in folders:
            (tmp_path / folder).mkdir(parents=True)
        write_class_folders(tmp_path, [folder for folder in folders if not folder.endswith("/")])
        with pytest.raises(UsageError) as caught:
            read_dataset(tmp_path)
        assert [part for part in messages if part in str(caught.value)] == messages
        assert "\n" not in str(caught.value)

    def test_images_without_class_folders_are_counted(self, tmp_path):
        for number in range(3):
            draw(tmp_path / f"{number}.jpg")
        with pytest.raises(UsageError, match=f"{tmp_path}: found 3 images and no folder per class; expected"):
            read_dataset(tmp_path)


class TestNothingIsPassedOverInSilence:
    def test_images_above_the_class_folders_are_a_warning(self, tmp_path):
        for split in ("train", "val"):
            write_class_folders(tmp_path / split)
            draw(tmp_path / split / "stray.png")
        draw(tmp_path / "top.JPG")
        (tmp_path / "notes.txt").touch()
        assert read_dataset(tmp_path).warnings == [
            "skipped 3 images outside the class folders: top.JPG, train/stray.png, val/stray.png"
        ]

    def test_kinds_that_are_not_read_and_classes_that_link_to_nowhere_are_warnings(self, tmp_path):
        write_class_folders(tmp_path)
        for name in ("x.heic", "y.CR2", "z.txt", ".hidden.heic"):
            (tmp_path / "a" / name).touch()
        (tmp_path / "c").symlink_to(tmp_path / "unmounted")
        assert sorted(read_dataset(tmp_path).warnings) == [
            "skipped 1 broken link next to the class folders: c",
            "skipped 2 images in unsupported formats: a/x.heic, a/y.CR2",
        ]

    def test_a_link_that_leads_nowhere_is_a_missing_image(self, tmp_path):
        write_class_folders(tmp_path)
        (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
        with pytest.raises(UsageError, match=r"1 of 11 listed images is missing: a/gone.png .--skip-missing"):
            read_dataset(tmp_path)

    def test_linked_folders_are_followed_and_circles_are_not(self, tmp_path):
        root = write_class_folders(tmp_path / "data")
        draw(tmp_path / "elsewhere" / "deep" / "more.png")
        (root / "a" / "linked").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere" / "deep" / "round").symlink_to(tmp_path / "elsewhere")
        (root / "a" / "up").symlink_to(root)
        found = read_dataset(root)
        names = [str(s.path.relative_to(root)) for s in [*found.train, *found.val] if s.label == 0]
        assert sorted(names) == [*(f"a/{i}.png" for i in range(5)), "a/linked/deep/more.png"]

    def test_a_folder_that_cannot_be_read_is_an_error(self, tmp_path, monkeypatch):
        write_class_folders(tmp_path)
        (tmp_path / "a" / "locked").mkdir()
        deny(monkeypatch, os, "scandir", "locked")
        with pytest.raises(UsageError, match=r"1 folder cannot be read: a/locked .Permission denied."):
            read_dataset(tmp_path)
