"""The effective receptive field: where the energy of the scores' gradients lies."""

import numpy as np
import pytest
import torch
from torch import nn

from opal_deploy.evaluation.receptive_field import measure_effective_field
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.receptive_field import compute_receptive_field
from opal_deploy.synthetic import example_images

STRIDE = 8


class _Patches(nn.Module):
    """Features of a cell are a weighted sum of the pixels in its box alone."""

    def __init__(self, used):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, STRIDE, STRIDE)
        weight = torch.zeros_like(self.convolution.weight)
        weight[:, :, *used] = torch.tensor([0.5, -1.0, 1.5, 1.0])[:, None, None, None]
        self.convolution.weight = nn.Parameter(weight)

    def forward(self, images):
        return {"features": self.convolution(images)}


@pytest.mark.parametrize(
    ("used", "side", "offset"),
    [
        ((slice(0, 8), slice(0, 8)), 8, 4.0),  # 36 of 64 pixels lie in a square of 6
        ((slice(3, 5), slice(3, 5)), 2, 4.0),
        ((slice(0, 1), slice(0, 1)), 1, 0.5),  # one corner of the box: the square lies there
    ],
)
def test_the_side_and_the_centre_are_those_of_the_weights(used, side, offset):
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig("resnet18", 3, (32, 32), stride=8))
    network.backbone = Backbone("patches", _Patches(used), 4, STRIDE)
    network.head.projection = nn.Conv2d(4, network.head.num_prototypes, 1)
    field = compute_receptive_field(network.backbone, (32, 32))
    assert (field.size, field.offset) == (8, 4.0)
    measured = measure_effective_field(network, np.stack(example_images(10, 32, 32)), field)
    assert (measured.effective, measured.effective_offset, measured.images) == (side, pytest.approx(offset), 10)
