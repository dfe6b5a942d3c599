"""Counters on real modules: closed forms, and that they respond to what is changed."""

import pytest
import torch
from torch import nn

from opal_deploy.bench.counting import count_backbone, count_module, count_paper_operations
from opal_deploy.errors import UsageError


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


def test_counting_skips_what_is_frozen_prints_nothing_and_leaves_torch_as_it_was(
    capsys,
):
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
