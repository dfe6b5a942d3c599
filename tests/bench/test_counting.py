"""Counters on real modules, and the tables of the heads' operations: closed forms, and what ptflops counts."""

import pytest
import torch
from torch import nn

from opal_deploy.bench.counting import (
    LINEAR_OPERATIONS,
    OPAL_OPERATIONS,
    Shape,
    count_backbone,
    count_module,
    count_paper_operations,
    sum_operations,
)
from opal_deploy.errors import UsageError
from opal_deploy.model.backbones import count_macs
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.model.head import OpalHead


def on_meta(*modules):
    return nn.Sequential(*modules).eval().to("meta")


@pytest.mark.parametrize(
    ("modules", "shape", "params", "macs", "more"),
    [
        # the paper adds a bias to the multiply-accumulates
        ((nn.Conv2d(3, 8, 3, padding=1),), (3, 10, 12), 8 * 28, 10 * 12 * 8 * 27, 10 * 12 * 8),
        ((nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False),), (8, 6, 6), 8 * 25, 6 * 6 * 8 * 25, 0),
        # on `meta` it runs as a product in Python, which ptflops counts again if it may
        ((nn.Linear(16, 4),), (7, 16), 17 * 4, 7 * 16 * 4, 7 * 4),
        # an activation, and a normalisation with weights, count twice
        ((nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()), (3, 4, 4), 24 + 16, 384, 4 * 8 * 16),
    ],
    ids=["convolution", "grouped", "linear", "normalisation and activation"],
)
def test_small_modules_are_closed_forms(modules, shape, params, macs, more):
    counts = count_module(on_meta(*modules), shape)
    assert (counts.params, counts.macs, counts.paper) == (params, macs, macs + more)
    assert counts.flops == 2 * macs


def test_counting_skips_what_is_frozen_prints_nothing_and_leaves_torch_as_it_was(capsys):
    relu, add = torch.nn.functional.relu, torch.Tensor.add
    module = on_meta(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1))
    module[0].requires_grad_(False)
    assert count_module(module, (3, 4, 4)).params == 8 * 2 + 2
    count_paper_operations(on_meta(nn.Conv2d(3, 8, 1), nn.ReLU()), (3, 4, 4))
    assert tuple(capsys.readouterr()) == ("", "")
    assert torch.nn.functional.relu is relu
    assert torch.Tensor.add is add
    with pytest.raises(UsageError, match="wrong one: ptflops cannot count it"):
        count_paper_operations(on_meta(nn.Conv2d(5, 8, 1)), (3, 4, 4), "wrong one")


def test_resnet18_at_160x192_is_the_sum_of_its_convolutions():
    backbone = count_backbone("resnet18", (160, 192))
    height, width = 160 // 2, 192 // 2
    macs = height * width * 64 * 3 * 49
    params = 64 * 3 * 49 + 2 * 64
    height, width, before = height // 2, width // 2, 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        if stage:
            height, width = height // 2, width // 2
        convolutions = [(before, 9), (channels, 9), (channels, 9), (channels, 9)] + [(before, 1)] * bool(stage)
        for inputs, kernel in convolutions:
            macs += height * width * channels * inputs * kernel
            params += channels * inputs * kernel + 2 * channels
        before = channels
    assert (backbone.counts.macs, backbone.counts.params) == (macs, params)
    assert (backbone.num_features, backbone.grid) == (512, (5, 6))
    with pytest.raises(UsageError, match="multiples of its stride 32"):
        count_backbone("resnet18", (100, 224))


SMALL = Shape(24, 6, 3, (4, 5))
OPAL = HeadConfig(prototypes_per_class=3)


class Authors(nn.Module):
    """A head in the manner of the authors': modules, and the anchors as a matrix that distances are taken to."""

    def __init__(self, shape, softmax):
        super().__init__()
        prototypes = shape.letters["K"]
        self.projection = nn.Conv2d(shape.num_features, prototypes, 1)
        self.softmax, self.pooling = softmax, nn.AdaptiveMaxPool2d(1)
        self.register_buffer("anchors", torch.zeros(shape.num_classes, prototypes))

    def forward(self, features):
        scores = self.pooling(self.softmax(self.projection(features))).flatten(1)
        z = scores / (scores.norm(dim=1, keepdim=True) + 1e-8)
        return -torch.cdist(z, self.get_buffer("anchors"))


@pytest.mark.parametrize("shape", [Shape(512, 1000, 3, (5, 6)), Shape(3, 2, 1, (1, 1))], ids=["ResNet-18", "one cell"])
def test_both_heads_are_closed_forms_in_the_papers_convention(shape):
    cells, features, classes = shape.grid[0] * shape.grid[1], shape.num_features, shape.num_classes
    prototypes = classes * shape.prototypes_per_class
    opal = sum_operations(OPAL_OPERATIONS, shape)
    assert (opal.paper, opal.params) == (cells * prototypes * (features + 4), prototypes * (features + 1))
    linear = sum_operations(LINEAR_OPERATIONS, shape)
    assert (linear.paper, linear.params) == (features * classes + 2 * cells * features, (features + 1) * classes)


@pytest.mark.parametrize("softmax", [nn.Softmax(dim=1), nn.Softmax2d()], ids=["Softmax", "Softmax2d"])
def test_the_papers_convention_is_what_ptflops_counts_for_modules_like_the_authors(softmax):
    counted = count_paper_operations(Authors(SMALL, softmax).eval(), (SMALL.num_features, *SMALL.grid))
    assert counted == sum_operations(OPAL_OPERATIONS, SMALL).paper


def test_a_dense_layers_bias_is_all_that_ptflops_adds_to_the_linear_head():
    expected = sum_operations(LINEAR_OPERATIONS, SMALL).paper
    for bias, extra in ((False, 0), (True, SMALL.num_classes)):
        dense = nn.Linear(SMALL.num_features, SMALL.num_classes, bias=bias)
        module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), dense).eval()
        assert count_paper_operations(module, (SMALL.num_features, *SMALL.grid)) == expected + extra


@pytest.mark.parametrize(
    ("head", "operations"), [(OPAL, OPAL_OPERATIONS), (LINEAR_BASELINE, LINEAR_OPERATIONS)], ids=["opal", "linear"]
)
def test_parameters_and_macs_are_those_of_the_real_modules(head, operations):
    with torch.device("meta"):
        module = OpalHead(SMALL.num_features, SMALL.num_classes, head).eval()
    counts = sum_operations(operations, SMALL)
    assert counts.params == sum(p.numel() for p in module.parameters())
    assert counts.macs == count_macs(module, (SMALL.num_features, *SMALL.grid))
    assert counts.flops == 2 * counts.macs
