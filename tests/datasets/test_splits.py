"""A split's name always means the same images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedShuffleSplit

from opal_deploy.datasets.samples import stratified_split
from opal_deploy.errors import UsageError


class TestStratifiedSplit:
    def test_it_is_scikit_learns_with_the_authors_seed(self) -> None:
        labels = [int(v) for v in np.random.default_rng(3).integers(0, 4, 200)]
        train, val = stratified_split(labels, list("abcd"))
        splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=42)
        expected_train, expected_val = next(splitter.split(np.zeros(200), labels))
        assert set(train) == set(expected_train)
        assert set(val) == set(expected_val)

    def test_a_class_with_one_image_is_named(self) -> None:
        with pytest.raises(UsageError, match="classes with a single image: lonely; add images"):
            stratified_split([0] * 10 + [1], ["many", "lonely"])
        with pytest.raises(UsageError, match=r"^birds: no validation split possible, classes with a single image"):
            stratified_split([0] * 10 + [1], ["many", "lonely"], root=Path("birds"))

    def test_fewer_validation_images_than_classes_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="6 images are too few for 3 classes"):
            stratified_split([0, 0, 1, 1, 2, 2], ["a", "b", "c"])
