"""Unbalanced and small classes, and early stopping."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.train.attention import Terms
from opal_deploy.train.balance import balance_warnings, balanced_weights
from opal_deploy.train.epoch import Objective, TrainStep
from opal_deploy.train.loop import fit
from opal_deploy.train.machine import MixedPrecision, ProcessGroup
from opal_deploy.train.recipe import TrainOptions
from opal_deploy.train.resume import read_config
from opal_deploy.train.run_directory import TrainRunDirectory
from tests.builders import NORM_FREE_BACKBONE

OPTIONS = TrainOptions(
    backbone=NORM_FREE_BACKBONE, epochs=4, batch_size=8, input_size=(64, 64), head=HeadConfig(prototypes_per_class=2),
    class_weights="balanced", patience=1,
)  # fmt: skip


def _with_counts(squares, *counts):
    """Return the data set with as many training images of each class."""
    train = [Sample(squares.train[0].path, label) for label, count in enumerate(counts) for _ in range(count)]
    return replace(squares, train=train)


def test_balanced_weights_are_scikit_learns(squares):
    data = _with_counts(squares, 40, 10, 3)
    labels = [sample.label for sample in data.train]
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    np.testing.assert_allclose(balanced_weights(data), expected)


@pytest.mark.parametrize(
    ("counts", "weighted", "expected"),
    [
        ((20, 20, 20), False, []),
        ((30, 11, 11), False, []),
        ((30, 11, 10), False, ["blue has 30 training images and red 10; --class-weights balanced"]),
        ((30, 11, 10), True, []),
        ((12, 9, 10), False, ["1 class has fewer than 10 training images (green 9)"]),
        ((90, 9, 4), True, ["2 classes have fewer than 10 training images (green 9, red 4)"]),
    ],
)
def test_unbalanced_and_small_classes_are_named(squares, counts, weighted, expected):
    found = balance_warnings(_with_counts(squares, *counts), weighted=weighted)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


class _Terms(nn.Module):
    """Layers that give logits, without terms of an attention."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, images, labels, regions):
        return Terms(self.layers(images), torch.zeros(len(labels)), torch.zeros(len(labels)))


def test_a_weight_scales_the_loss_and_the_gradient_of_its_class():
    images, labels = torch.zeros(4, 8, 8, 3, dtype=torch.uint8), torch.tensor([0, 0, 0, 1])
    gradients = []
    for weights in (None, torch.tensor([2 / 3, 2.0])):
        torch.manual_seed(0)
        model = _Terms(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        group, amp = ProcessGroup(torch.device("cpu")), MixedPrecision("cpu", None)
        step = TrainStep(model, optimizer, amp, group, (0.5,) * 3, (0.5,) * 3, Objective(class_weights=weights))
        step.step(images, labels, 4)
        gradients.append(model.layers[1].bias.grad)
    # all images are equal, so that the weighted gradient is that of as many images of each class
    unweighted, weighted = gradients
    probability = unweighted[0] + 3 / 4
    torch.testing.assert_close(weighted[0], probability - 1 / 2)


def test_a_run_stops_without_improvement_and_its_resumption_ends_there_too(squares, tmp_path, curves):
    lines = []
    # at this rate no step improves anything
    options = replace(OPTIONS, lr=1e-12, augment="none")
    result = fit(squares, options, tmp_path / "run", log=lines.append)
    stopped = len(result.epochs)
    assert stopped == result.best_epoch + 1 < 4
    assert set(curves) == {"training"}  # not augmented
    assert lines[-1] == f"stopping: no lower validation loss since epoch {result.best_epoch}"
    stored = read_config(TrainRunDirectory(tmp_path / "run"))["options"]
    assert (stored["class_weights"], stored["patience"]) == ("balanced", 1)
    assert len(fit(squares, options, tmp_path / "run", resume=True).epochs) == stopped
    with pytest.raises(UsageError, match="class_weights was"):
        fit(squares, replace(options, class_weights="none"), tmp_path / "run", resume=True)
