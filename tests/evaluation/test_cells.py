"""Sampled images, rankings of cells, the blur, the foreground, Grad-CAM and the effective field, each by hand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.cells import (
    GradCam,
    blur_image,
    build_rankings,
    measure_receptive_field,
    replace_cells,
    sum_by_cell,
)
from opal_deploy.evaluation.session import choose_samples
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.synthetic import example_images

METADATA = Metadata(
    ("shown", "rival", "other"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 4), (32, 32)
)


def _samples(labels, **options):
    return [Sample(Path(f"{number}.png"), label, **options) for number, label in enumerate(labels)]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 11])
def test_samples_are_chosen_evenly_over_classes(limit):
    labels = [0] * 10 + [1] * 3 + [2] * 10
    chosen = choose_samples(_samples(labels), limit)

    assert len(chosen) == len(set(chosen)) == limit
    assert chosen == sorted(chosen)
    counts = Counter(labels[index] for index in chosen)
    open_classes = [counts[label] for label, size in ((0, 10), (1, 3), (2, 10)) if counts[label] < size]
    assert max(counts.values()) - min(open_classes) <= 1
    # evenly within a class, and never more than there are
    assert choose_samples(_samples([0] * 12), 4) == [0, 3, 6, 9]
    assert choose_samples(_samples([1, 0, 1]), 10) == [0, 1, 2]


def _outputs(argmax, scores, logits):
    return Outputs(np.array([logits], np.float32), np.array([argmax], np.int32), np.array([scores], np.float32))


EVERYWHERE = np.ones(16, np.bool_)
# evidence 10, 5
OUTPUTS = _outputs([5, 10, 5, 2, 3, 3], [0.4, 0.9, 0.3, 0.2, 0.1, 0.1], [-0.1, -0.2, -0.3])


def test_cells_are_ranked_by_contribution_and_slots_of_one_cell_add_up():
    metadata = replace(METADATA, class_names=("a", "b"), prototypes_per_class=3)
    outputs = _outputs([7, 2, 7, 1, 1, 1], [0.3, 0.5, 0.3, 0.1, 0.2, 0.3], [-0.1, -0.2])
    assert list(sum_by_cell(0, outputs, 0, metadata)) == [7, 2]
    assert list(sum_by_cell(1, outputs, 0, metadata)) == [1]


def test_rankings_of_the_controls():
    heat_map = np.zeros(16, np.float32)
    heat_map[[6, 10]] = 2.0, 1.0
    rankings = build_rankings(OUTPUTS, 0, METADATA, EVERYWHERE, index=0, heat_map=heat_map)

    assert rankings["contribution"] == (10, 5)
    assert rankings["grad-cam"] == (6, 10)
    assert len(rankings["random"]) == 2
    assert not {5, 10} & {*rankings["random"]}


def test_random_cells_are_foreground_and_reach_every_cell_that_is_no_evidence():
    few, none = np.isin(np.arange(16), [5, 8]), np.isin(np.arange(16), [5, 10])
    for index in range(5):
        assert build_rankings(OUTPUTS, 0, METADATA, few, index=index)["random"] == (8,)
    assert "random" not in build_rankings(OUTPUTS, 0, METADATA, none, index=0)

    drawn = Counter(
        cell for index in range(200) for cell in build_rankings(OUTPUTS, 0, METADATA, EVERYWHERE, index=index)["random"]
    )
    assert set(drawn) == set(range(16)) - {5, 10}
    assert max(drawn.values()) < 3 * min(drawn.values())


IMAGE = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)


def test_only_the_rectangles_of_the_cells_are_replaced():
    fill = np.full_like(IMAGE, 7)
    assert (replace_cells(IMAGE, fill, frozenset(range(16)), CellGrid(4, 4)) == fill).all()
    assert (replace_cells(IMAGE, fill, frozenset(), CellGrid(4, 4)) == IMAGE).all()
    changed = replace_cells(IMAGE, fill, frozenset({0, 6}), CellGrid(4, 4))
    assert (changed[:8, :12] == 7).all()
    assert (changed[8:16, 24:36] == 7).all()
    changed[:8, :12], changed[8:16, 24:36] = IMAGE[:8, :12], IMAGE[8:16, 24:36]
    assert (changed == IMAGE).all()


def test_a_blur_keeps_the_mean_colour():
    smooth = (IMAGE // 4 + np.array([90, 40, 120], np.uint8)).astype(np.uint8)
    blurred = blur_image(smooth, CellGrid(4, 4))
    assert blurred.dtype == np.uint8
    assert blurred.mean(axis=(0, 1)) == pytest.approx(smooth.mean(axis=(0, 1)), abs=2.5)
    assert (blurred.std(axis=(0, 1)) < 0.5 * smooth.std(axis=(0, 1))).all()


def test_grad_cam_is_the_gradients_mean_times_the_features():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = NetworkConfig("shufflenet_v2_x0_5", 3, (64, 64), HeadConfig(prototypes_per_class=2))
        network = OpalNetwork(config).eval()
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    classes = np.array([2, 0])
    heat_map = GradCam(network)(images, classes)

    assert heat_map.shape == (2, 4)
    # in double precision, from the whole Jacobian
    with torch.no_grad():
        features = network.backbone(torch.from_numpy(normalise(images, METADATA.mean, METADATA.std))).double()
    head = network.head.double()
    for row, class_id in enumerate(classes):
        point = features[row : row + 1].clone().requires_grad_()
        jacobian = torch.autograd.functional.jacobian(
            lambda x, c=class_id: head.classify(head.pool(head.attend(head.projection(x))))[0, c], point
        )
        expected = (jacobian.mean(dim=(2, 3), keepdim=True) * features[row : row + 1]).sum(1).flatten()
        assert heat_map[row] == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-6)


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
def test_the_side_and_the_centre_are_those_of_the_weights(tmp_path, used, side, offset):
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig("resnet18", 3, (32, 32), stride=8))
    network.backbone = Backbone("patches", _Patches(used), 4, STRIDE)
    network.head.projection = nn.Conv2d(4, network.head.num_prototypes, 1)
    samples = [Sample(tmp_path / f"{number}.png", 0) for number in range(10)]
    for sample, image in zip(samples, example_images(10, 32, 32), strict=True):
        Image.fromarray(image).save(sample.path)
    measured = measure_receptive_field(network, samples)
    assert (measured.size, measured.offset) == (8, 4.0)
    assert (measured.effective, measured.effective_offset, measured.images) == (side, pytest.approx(offset), 10)
