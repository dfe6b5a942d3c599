"""Training against changes outside the boxes."""

import pytest
import torch

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.attack import LEVELS, outside_boxes
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.images import normalize
from opal_deploy.train.losses import NetworkTerms, Objective, change_outside, keep_apart
from tests.builders import SMALL_BACKBONE

_HEAD = HeadConfig(prototypes_per_class=2)
_CONFIG = NetworkConfig(SMALL_BACKBONE, 2, (128, 128), _HEAD, stride=16)
_LABELS = torch.tensor([0, 1, 0, 1])


def build_network():
    torch.manual_seed(0)
    return OpalNetwork(_CONFIG).eval()


def draw_images():
    pixels = torch.randint(256, (4, 128, 128, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return normalize(pixels, _CONFIG.mean, _CONFIG.std)


def test_an_adversary_changes_few_grey_levels_outside_the_boxes_only():
    images, cells = draw_images(), torch.tensor([[0, 9]] * 4)
    # from a random start of up to half of what is allowed, one step makes every pixel darker
    changed = change_outside(images, cells, lambda pixels: pixels.mean((1, 2, 3)), _CONFIG, (8, 8))
    listed = torch.ones_like(cells, dtype=torch.bool)
    free = outside_boxes(cells, listed, (128, 128), CellGrid(8, 8), EvaluateOptions.attack_margin)
    std = torch.tensor(_CONFIG.std).reshape(1, 3, 1, 1)
    black = normalize(torch.zeros(1, 1, 1, 3, dtype=torch.uint8), _CONFIG.mean, _CONFIG.std)
    levels, brightness = ((images - other) * std * 255 for other in (changed, black))
    assert (levels <= LEVELS * free + 1e-3).all()
    assert (levels >= brightness.clamp_max(LEVELS / 2) * free - 1e-3).all()
    # inside the box of cell 9
    assert not free[0, 0, 40, 40]


def measure_drop(network, images):
    """Return the share of the labelled class's scores that the attack takes."""
    with torch.no_grad():
        channels = torch.from_numpy(network.config.class_map.channel_table)[_LABELS]
        scores = network.explain(images).scores.gather(1, channels).mean()
    return (NetworkTerms(network, adversarial=True)(images, _LABELS, None).drop.mean() / scores).item()


def test_training_against_it_lowers_what_changes_outside_the_boxes_do():
    images, drops = draw_images(), []
    for weight in (0.0, 1.0):
        network = build_network().train()
        model, objective = NetworkTerms(network, adversarial=weight > 0), Objective(adversarial=weight)
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        for _ in range(30):
            loss, _ = objective(model(images, _LABELS, None), _LABELS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        drops.append(measure_drop(network.eval(), images))
    assert drops[1] < 0.5 * drops[0]


def test_changed_images_leave_the_batch_statistics_alone():
    plain, attacked = build_network().train(), build_network().train()
    images = draw_images()
    NetworkTerms(plain)(images, _LABELS, None)
    terms = NetworkTerms(attacked, adversarial=True)(images, _LABELS, None)
    assert attacked.backbone.training
    assert (terms.drop >= 0).all()
    assert terms.changed.shape == (4, 2)
    for (name, expected), actual in zip(plain.named_buffers(), attacked.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, msg=name)


def test_slots_kept_apart_score_where_the_stronger_ones_are_not():
    attention = torch.zeros(1, 3, 4, 4)
    # both slots are strongest in the same corner; the weaker one's next best cells are beside it and far away
    attention[0, 0, 0, 0], attention[0, 2, 0, 0] = 0.9, 0.8
    attention[0, 2, 1, 1], attention[0, 2, 3, 3] = 0.6, 0.2
    assert keep_apart(attention, torch.tensor([[0, 2]])).tolist() == [[pytest.approx(0.9), pytest.approx(0.2)]]
