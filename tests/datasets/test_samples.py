"""A data set's description, and the stratified split, whose name always means the same images."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedShuffleSplit

from opal_deploy.datasets.samples import DataSet, Sample, stratified_split
from opal_deploy.errors import UsageError


def test_split_is_scikit_learns_with_the_authors_seed():
    labels = [int(v) for v in np.random.default_rng(3).integers(0, 4, 200)]
    train, val = stratified_split(labels, list("abcd"))
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=42)
    expected_train, expected_val = next(splitter.split(np.zeros(200), labels))
    assert set(train) == set(expected_train)
    assert set(val) == set(expected_val)


@pytest.mark.parametrize(
    ("labels", "names", "root", "message"),
    [
        ([0] * 10 + [1], ["a", "lonely"], None, "^no validation split .* with a single image: lonely; add images"),
        ([0] * 10 + [1], ["a", "lonely"], Path("birds"), "^birds: no validation split possible, classes with a single"),
        ([0, 0, 1, 1, 2, 2], ["a", "b", "c"], None, "6 images are too few for 3 classes"),
    ],
)
def test_impossible_split(labels, names, root, message):
    with pytest.raises(UsageError, match=message):
        stratified_split(labels, names, root=root)


def test_description_is_one_line(tmp_path):
    one, many = [Sample(tmp_path, 0)], [Sample(tmp_path, 1)] * 1500
    cropped = DataSet(tmp_path, "cub", ["a", "b"], one, [], many, crop="boxes")
    assert cropped.describe() == (
        f"cub from {tmp_path}: 2 classes, 1 image to train on, 0 to validate, 1,500 to test, cropped to their boxes"
    )
    whole = DataSet(tmp_path, "imagefolder", ["a", "b"], one * 8, one * 2, [])
    assert whole.describe() == (
        f"imagefolder from {tmp_path}: 2 classes, 8 images to train on, 2 to validate, 0 to test"
    )
