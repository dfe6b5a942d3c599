"""Attacks outside the evidence: exact where cells see their boxes alone, and not where they see everything."""

import numpy as np
import torch
from torch import nn

from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.evaluation.attack import BOXES, FIELD, NOISE, PGD, Attacker
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.synthetic import example_images

STRIDE, SIDE = 8, 48


class _Patches(nn.Module):
    """Features of a cell come from its box alone; or, pooled, from the whole image."""

    def __init__(self, pooled):
        super().__init__()
        self.convolution, self.pooled = nn.Conv2d(3, 12, STRIDE, STRIDE), pooled

    def forward(self, images):
        features = self.convolution(images)
        return {"features": features + 5 * features.mean((2, 3), keepdim=True) if self.pooled else features}


def attack(pooled):
    torch.manual_seed(0)
    config = NetworkConfig("resnet18", 3, (SIDE, SIDE), stride=STRIDE, head=HeadConfig())
    network = OpalNetwork(config)
    network.backbone = Backbone("patches", _Patches(pooled), 12, STRIDE)
    network.head = type(network.head)(12, 3, config.head)
    with torch.no_grad():
        network.head.projection.weight *= 8
    field = ReceptiveField(STRIDE, size=STRIDE, offset=4.0, effective=STRIDE, effective_offset=4.0)
    attacker = Attacker(network.eval(), build_metadata(Checkpoint(network, ("a", "b", "c"))), 0, field)
    return attacker.measure(np.stack(example_images(6, SIDE, SIDE)), range(6))


def test_nothing_outside_moves_a_score_that_comes_from_its_box_alone():
    measured = attack(pooled=False)
    assert set(measured) == {(region, method) for region in (BOXES, FIELD) for method in (NOISE, PGD)}
    for region in (BOXES, FIELD):
        figures = measured[region, PGD]
        assert figures["kept"].all()
        for name in ("score_drop", "cells_moved"):
            np.testing.assert_array_equal(figures[name], 0)
        # five cells at most of 36
        assert (np.rint(36 * figures["area"]) >= 31).all()
        # random changes cannot lower it either
        assert (measured[region, NOISE]["score_drop"] <= 0).all()


def test_a_pooling_before_the_head_is_measured():
    measured = attack(pooled=True)
    figures = measured[BOXES, PGD]
    assert figures["score_drop"].mean() > 0.05
    assert figures["score_drop"].mean() > measured[BOXES, NOISE]["score_drop"].mean()
