"""Unbalanced classes, and early stopping."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from opal_deploy.datasets.samples import Sample
from opal_deploy.train.api import warn_of_balance
from opal_deploy.train.losses import Objective, Terms, balance_classes
from tests.builders import NORM_FREE_BACKBONE
from tests.train.fitting import fit, small

OPTIONS = small(backbone=NORM_FREE_BACKBONE, epochs=4, batch_size=8, size=64, class_weights="balanced", patience=1)


def _with_counts(squares, *counts):
    """Return the data set with as many training images of each class."""
    train = [Sample(squares.train[0].path, label) for label, count in enumerate(counts) for _ in range(count)]
    return replace(squares, train=train)


def test_balanced_weights_are_scikit_learns(squares):
    data = _with_counts(squares, 40, 10, 3)
    labels = [sample.label for sample in data.train]
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    np.testing.assert_allclose(balance_classes(data), expected)


def test_unbalanced_classes_are_named(squares):
    assert warn_of_balance(_with_counts(squares, 30, 11, 11)) == []
    (line,) = warn_of_balance(_with_counts(squares, 30, 11, 10))
    assert "blue has 30 training images and red 10" in line


def test_a_weight_scales_the_loss_of_its_class():
    terms, objective = Terms(torch.zeros(2, 2), torch.zeros(2)), Objective(class_weights=torch.tensor([1.0, 3.0]))
    assert objective(terms, torch.tensor([0, 1]))[0].item() == pytest.approx(4 * math.log(2))


def test_a_run_stops_without_improvement_and_its_resumption_ends_there_too(squares, tmp_path):
    lines = []
    # at this rate no step improves anything
    options = replace(OPTIONS, lr=1e-12, augment="none")
    result = fit(squares, options, tmp_path / "run", log=lines.append)
    stopped = len(result.epochs)
    assert stopped == result.best_epoch + 1 < 4
    assert lines[-1] == f"stopping: no lower validation loss since epoch {result.best_epoch}"
    assert len(fit(squares, options, tmp_path / "run", resume=True).epochs) == stopped
