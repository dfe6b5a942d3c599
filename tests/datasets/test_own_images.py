"""Data sets of a user's own: a folder per class, or a list."""

import pytest

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from tests.datasets.layouts import draw, write_class_folders, write_lines


class TestImageFolder:
    def test_classes_are_the_folders_sorted_by_name(self, tmp_path):
        found = read_dataset(write_class_folders(tmp_path, ["train", "bus", "a"]))
        assert found.class_names == ["a", "bus", "train"]
        assert all(sample.path.parent.name == found.class_names[sample.label] for sample in found.train)

    def test_image_names_count_in_any_case_and_what_is_hidden_or_left_by_systems_and_runs_does_not(self, tmp_path):
        write_class_folders(tmp_path)
        images = "a/UPPER.PNG a/deeper/photo.JPeG a/saved.jfif a/SAVED.JPE"
        others = "a/._photo.jpg @eaDir/a.jpg a/@eaDir/b.jpg __MACOSX/c.jpg .ipynb_checkpoints/d.jpg out/overlays/e.jpg"
        for name in f"{images} {others}".split():
            draw(tmp_path / name)
        (tmp_path / "a/notes.txt").write_text("no image")
        (tmp_path / "out/run.json").write_text("{}")
        data = read_dataset(tmp_path)
        assert data.class_names == ["a", "b"]
        names = {sample.path.name for sample in data.select("all") if sample.label == 0}
        numbered = {f"{number}.png" for number in range(5)}
        assert names - numbered == {"UPPER.PNG", "photo.JPeG", "saved.jfif", "SAVED.JPE"}

    def test_a_class_is_one_however_its_name_is_encoded(self, tmp_path):
        write_class_folders(tmp_path / "train", ["Möwe", "Mo\u0308we", "b"])
        write_class_folders(tmp_path / "test", ["Mo\u0308we", "b"], count=2)
        found = read_dataset(tmp_path)
        assert (found.class_names, len(found.train) + len(found.val), len(found.test)) == (["Möwe", "b"], 15, 4)

    @pytest.mark.parametrize("names", [("train", "valid", "test"), ("Training", "VALIDATION", "Testing")])
    def test_split_folders_are_taken_as_they_are(self, tmp_path, names):
        for split, count in zip(names, (4, 2, 3), strict=True):
            write_class_folders(tmp_path / split, count=count)
        found = read_dataset(tmp_path)
        assert (len(found.train), len(found.val), len(found.test)) == (8, 4, 6)

    @pytest.mark.parametrize(
        ("folders", "messages"),
        [
            ([], ["at least 2 are needed"]),
            (["a"], ["at least 2 are needed"]),
            (["val/a", "val/b"], ["no train/"]),
            (["train/a", "train/b", "test/a", "test/b", "test/z"], ["classes in test/ that train/ lacks: z"]),
            (["train/a", "train/b", "training/a", "training/b"], ["train/ and training/ both look like train"]),
            (["train/a", "train/empty/", "test/q"], ["classes without a training image: empty", "train/ lacks: q"]),
        ],
        ids=["none", "one", "val alone", "a class only tested", "two trains", "several problems"],
    )
    def test_impossible_folders_are_one_line(self, tmp_path, folders, messages):
        for folder in folders:
            (tmp_path / folder).mkdir(parents=True)
        write_class_folders(tmp_path, [folder for folder in folders if not folder.endswith("/")])
        with pytest.raises(UsageError) as caught:
            read_dataset(tmp_path)
        assert [part for part in messages if part in str(caught.value)] == messages
        assert "\n" not in str(caught.value)

    def test_imagenets_folders_without_its_devkit_are_classes(self, tmp_path):
        write_class_folders(tmp_path, [f"{split}/{wnid}" for split in ("train", "val") for wnid in ("n0144", "n0210")])
        assert read_dataset(tmp_path).layout == "imagefolder"


class TestNothingIsPassedOverInSilence:
    def test_unused_images_are_a_warning(self, tmp_path):
        for split in ("train", "val"):
            write_class_folders(tmp_path / split)
            draw(tmp_path / split / "stray.png")
        draw(tmp_path / "top.JPG")
        (line,) = read_dataset(tmp_path).warnings
        assert line.endswith("folders: top.JPG, train/stray.png, val/stray.png")

    def test_a_link_that_leads_nowhere_is_a_missing_image(self, tmp_path):
        write_class_folders(tmp_path)
        (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
        with pytest.raises(UsageError, match=r"1 listed image missing"):
            read_dataset(tmp_path)

    def test_linked_class_folders_are_followed(self, tmp_path):
        root = write_class_folders(tmp_path / "data")
        (root / "c").symlink_to(write_class_folders(tmp_path / "elsewhere", "c") / "c")
        assert read_dataset(root).class_names == ["a", "b", "c"]


class TestList:
    """`labels.csv` in the folder of the images."""

    def write(self, root, *lines):
        for name in "abcdefghijkl":
            draw(root / "photos" / f"{name}.png")
        write_lines(root / "labels.csv", lines)
        return root

    def test_images_have_the_lists_labels_and_splits(self, tmp_path):
        rows = [
            f"photos/{name}.png, {'Jay' if name < 'g' else 'Auk'}, {'TEST' if name in 'fl' else ''}"
            for name in "abcdefghijkl"
        ]
        data = read_dataset(self.write(tmp_path, "Filename, label, split", *rows))
        assert (data.layout, data.class_names, len(data.train), len(data.val)) == ("csv", ["Auk", "Jay"], 8, 2)
        assert {sample.path.name: sample.label for sample in data.test} == {"f.png": 1, "l.png": 0}

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("photos/a.png,", "line 2"),
            ("photos/a.png,Auk,some", "line 2"),
            ("../a.png,Auk,", "lead out"),
            ("z.png,Auk,", "missing"),
        ],
    )
    def test_a_row_that_cannot_be_used_is_named(self, tmp_path, row, message):
        with pytest.raises(UsageError, match=message):
            read_dataset(self.write(tmp_path, "image,label,split", row, "photos/b.png,Auk,", "photos/c.png,Jay,"))
