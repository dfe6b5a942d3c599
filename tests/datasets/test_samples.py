"""The stratified split is the authors'."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedShuffleSplit
from torchvision.datasets import ImageFolder

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, Sample, split_off_validation

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


@pytest.mark.data
@pytest.mark.parametrize("name", ["cub_mini", "cub100_227px"])
def test_validation_images_of_real_lists_are_the_authors(name, shared_data, tmp_path):
    data = read_dataset(shared_data(name))
    for sample in (*data.train, *data.val):
        (tmp_path / sample.path.parent.name).mkdir(exist_ok=True)
        (tmp_path / sample.path.parent.name / sample.path.name).touch()
    assert {s.path.name for s in data.val} == _scikit_learns_validation_images(tmp_path)
