"""A training loop of one's own: the head learns, the file exports, and its answers are the network's."""

import numpy as np
import pytest
import torch
from torchvision.models import shufflenet_v2_x0_5

import opal_deploy
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.preprocess.resize import normalise
from opal_deploy.synthetic import example_images
from tests.builders import SMALL_BACKBONE

NAMES = ["Albatross", "Gull", "Tern"]


def test_a_trained_classifier_gives_its_backbone_in_memory_or_from_any_file(tmp_path):
    own = shufflenet_v2_x0_5(num_classes=7)
    state = own.state_dict()
    torch.save({"state_dict": {f"model.module.{name}": value for name, value in state.items()}}, tmp_path / "own.ckpt")
    for weights in (own, state, tmp_path / "own.ckpt"):
        network = opal_deploy.nn.build_network("shufflenet_v2_x0_5", 3, size=64, weights=weights)
        taken = network.backbone.body.state_dict()
        assert taken
        assert all(torch.equal(value, state[name]) for name, value in taken.items())
    refused = {
        "a state dict in memory does not fit resnet18: ": state,
        "a state dict in memory: expected a state dict": {**state, "epoch": 3},
        "found dict": {1: state["fc.bias"]},
    }
    for message, weights in refused.items():
        with pytest.raises(CheckpointError, match=message):
            opal_deploy.nn.build_network("resnet18", 3, weights=weights)


def test_a_loop_of_one_s_own_trains_a_network_that_is_exported(tmp_path):
    torch.manual_seed(0)
    images = example_images(24, 96, 96)
    # three kinds that differ in colour
    for number in range(24):
        images[number, ..., number % 3] //= 4
    labels = torch.arange(24) % 3
    network = opal_deploy.nn.build_network(SMALL_BACKBONE, 3, size=96, prototypes=2)
    pixels = torch.from_numpy(normalise(images, network.config.mean, network.config.std))
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        loss = opal_deploy.nn.cross_entropy(network(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    path = opal_deploy.nn.save_checkpoint(network, NAMES, tmp_path / "mine.pt")
    exported = opal_deploy.export_model(path, threads=1, log=lambda _: None)
    answers = opal_deploy.load(exported.path, device="cpu", threads=1).predict(list(images[:6]))
    network.eval()
    with torch.no_grad():
        logits = network(pixels[:6])
    assert [answer.label for answer in answers] == [NAMES[index] for index in logits.argmax(1)]
    np.testing.assert_allclose([answer.answered.prediction.logit for answer in answers], logits.amax(1), atol=1e-4)
    with pytest.raises(UsageError, match="2 class names for 3 classes"):
        opal_deploy.nn.save_checkpoint(network, NAMES[:2], tmp_path / "other.pt")
