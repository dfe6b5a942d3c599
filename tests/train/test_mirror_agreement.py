"""The term for mirrored cells: 0 where both views agree, and a lesson where they do not."""

import pytest
import torch

from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.epoch import MirrorAgreement, measure_disagreement

# two classes of one slot each: the labelled class's is the second channel
LABELS = torch.tensor([1])


def one_cell(row, col):
    attention = torch.zeros(1, 2, 4, 4)
    attention[0, 1, row, col] = 1.0
    return attention


def test_the_same_cell_costs_nothing_and_another_much():
    same, other = (measure_disagreement(one_cell(1, 2), one_cell(*cell), LABELS, 1) for cell in ((1, 2), (1, 3)))
    assert same.item() == pytest.approx(0, abs=1e-6)
    assert other.item() > 10
    # slots of other classes do not count
    elsewhere = one_cell(1, 2)
    elsewhere[0, 0, 3, 3] = 1.0
    assert measure_disagreement(one_cell(1, 2), elsewhere, LABELS, 1).item() == pytest.approx(0, abs=1e-6)


def test_training_on_it_brings_the_mirrored_cell_back():
    torch.manual_seed(0)
    head = HeadConfig(prototypes_per_class=2)
    network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 2, (64, 64), head, stride=16)).eval()
    model = MirrorAgreement(network)
    images, labels = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 0, 1])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        _, disagreement = model(images, labels)
        optimizer.zero_grad()
        disagreement.mean().backward()
        optimizer.step()
        losses.append(disagreement.mean().item())
    # in evaluation mode the first half is the plain network's
    torch.testing.assert_close(model(images, labels)[0][:4], network(images))
    assert losses[-1] < 0.5 * losses[0]
