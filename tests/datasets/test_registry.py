"""Data sets are recognized by their files, or named, and split as the authors split them."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedShuffleSplit
from torchvision.datasets import ImageFolder

from opal_deploy.datasets.registry import DATASET_NAMES, read_dataset
from opal_deploy.datasets.samples import DataSet, Sample, split_off_validation
from opal_deploy.errors import UsageError
from tests.datasets.layouts import deny, write_class_folders, write_cub


@pytest.mark.parametrize("name", DATASET_NAMES)
def test_missing_or_empty_folder_is_one_line(tmp_path, name):
    with pytest.raises(UsageError, match="no such folder"):
        read_dataset(tmp_path / "nowhere", name)
    with pytest.raises(UsageError, match=r"lacks|at least 2 are needed") as caught:
        read_dataset(tmp_path, name)
    assert "\n" not in str(caught.value)


def test_a_folder_that_looks_like_several_data_sets(tmp_path):
    (write_cub(tmp_path) / "101_ObjectCategories").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"\(cub, caltech101\)"):
        read_dataset(tmp_path)
    assert read_dataset(tmp_path, "cub").layout == "cub"


@pytest.mark.parametrize(("call", "file"), [("open", "images.txt"), ("read_bytes", "classes.txt")])
def test_unreadable_file_is_one_line(tmp_path, monkeypatch, call, file):
    write_cub(tmp_path)
    deny(monkeypatch, Path, call, file)
    with pytest.raises(UsageError, match=rf"\A.*{file}: cannot be read \(Permission denied\); .*\Z"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_images_to_split_name_their_folder(tmp_path, count):
    with pytest.raises(UsageError, match=rf"^{tmp_path}: no stratified split"):
        read_dataset(write_class_folders(tmp_path, count=count))


def test_a_class_that_is_not_validated_is_named(tmp_path):
    write_class_folders(tmp_path, count=28)
    for path in sorted((tmp_path / "b").iterdir())[2:]:
        path.unlink()
    (line,) = [line for line in read_dataset(tmp_path).warnings if "validation" in line]
    assert line == "classes without a validation image: b"


def test_progress_is_reported_image_by_image(tmp_path):
    reports = []
    read_dataset(write_class_folders(tmp_path), progress=lambda *state: reports.append(state))
    assert reports == [(done, 10, "reading headers") for done in range(1, 11)]


# the split of validation images, which is the authors' --------------------------------------------------------------

NAMES = ("wren", "Jay", "auk", "Bee eater")


def _scikit_learns_validation_images(root):
    """The names of the validation images that the authors' `split_train_val_indices` takes of an ImageFolder."""
    images = ImageFolder(root)
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=42)
    _, val = next(splitter.split(np.zeros(len(images)), images.targets))
    return {Path(images.samples[i][0]).name for i in val}


@pytest.mark.parametrize("lies", ["in-class-folders", "flat", "in-subfolders"])
def test_validation_images_are_those_of_an_image_folder_whatever_the_order_of_the_lists(lies, tmp_path):
    rng = np.random.default_rng(0)
    samples = []
    for label, name in enumerate(NAMES):
        # the folder that the images lie in is the class's where each class has its own
        folder = {"in-class-folders": f"n{7 - label}-{name}"}.get(lies, name)
        for number in rng.permutation(18):
            below = f"{number % 3}" if lies == "in-subfolders" and number % 4 else ""
            file = f"{number}_{label}.jpg"
            (tmp_path / "train" / folder / below).mkdir(parents=True, exist_ok=True)
            (tmp_path / "train" / folder / below / file).touch()
            samples.append(Sample(tmp_path / "train" / ("" if lies == "flat" else f"{folder}/{below}") / file, label))
    samples = [samples[i] for i in rng.permutation(len(samples))]
    listed = DataSet(tmp_path, "cub", list(NAMES), samples, [], [])
    data = split_off_validation(listed)
    assert {s.path.name for s in data.val} == _scikit_learns_validation_images(tmp_path / "train")
    assert data.train == [s for s in samples if s not in data.val]
