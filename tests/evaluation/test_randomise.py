"""Shuffled weights: evidence that the network learned goes, and evidence that does not depend on it is measured out."""

import pytest
import torch
from torch import nn

from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.annotations import Annotations, ImageAnnotation
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.evaluation.randomise import format_randomisation, measure_randomisation
from opal_deploy.model.backbones import Backbone
from tests.builders import build_checkpoint

SIDE = 96


class _Spot(nn.Module):
    """Adds the same bright cell to the features, whatever the weights before it."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("spot", torch.zeros(1, 24, 3, 3))
        self.spot[0, :, 1, 2] = 1e3

    def forward(self, images):
        return {"features": self.body(images)["features"] + self.spot}


@pytest.fixture
def samples(make_pictures, tmp_path):
    return [Sample(path, number % 4) for number, path in enumerate(make_pictures(tmp_path, 12))]


def measure(samples, fixed):
    loaded = build_checkpoint(size=(SIDE, SIDE))
    network = loaded.network
    if fixed:
        network.backbone = Backbone("spot", _Spot(network.backbone.body), 24, 32)
        # no softmax over channels, and weights of one sign: the bright cell has every channel's maximum
        with torch.no_grad():
            network.head.projection.weight.abs_()
            network.head.projection.bias.zero_()
        network.head.attend = lambda projected: projected
    # the object is the right column of cells
    annotations = Annotations([ImageAnnotation("a", boxes=((64, 0, 96, 96),))] * len(samples), "cells of the boxes")
    return measure_randomisation(loaded, samples, annotations, EvaluateOptions(device="cpu", threads=1))


def test_what_was_learned_goes_and_chance_is_told(samples):
    measured = measure(samples, fixed=False)
    names = [stage.shuffled for stage in measured.stages]
    assert names == ["nothing", "the head", "second", "first"]
    assert measured.stages[0].same_cell.mean == 1.0
    # of nine cells some stay by chance, more than a ninth since the background of pictures is even
    assert measured.stages[-1].same_cell.mean < 0.6
    assert measured.stages[0].object.random == pytest.approx(1 / 3)
    assert len(list(format_randomisation(measured))) == 2 + len(names)


def test_evidence_that_ignores_the_weights_keeps_its_hits(samples):
    measured = measure(samples, fixed=True)
    for stage in measured.stages:
        assert stage.same_cell.mean == 1.0
        assert stage.object.mean == 1.0
