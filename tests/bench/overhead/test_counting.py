"""Counters on real modules: closed forms, and that they respond to what is changed."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import Tensor, nn

from opal_deploy.bench.overhead.counting import count_backbone, count_module, count_paper_operations
from opal_deploy.errors import UsageError
from opal_deploy.model import backbones
from opal_deploy.model.backbones import backbone_macs, count_macs


def _meta(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules).eval().to("meta")


class TestSmallModules:
    def test_a_convolution_is_its_macs_and_the_paper_adds_its_bias(self) -> None:
        found = count_module(_meta(nn.Conv2d(3, 8, 3, padding=1)), (3, 10, 12))
        assert found.macs == 10 * 12 * 8 * 3 * 9
        assert found.paper == found.macs + 10 * 12 * 8
        assert found.params == 8 * 3 * 9 + 8
        assert found.flops == 2 * found.macs

    def test_groups_divide_a_convolution(self) -> None:
        assert count_macs(_meta(nn.Conv2d(8, 8, 5, padding=2, groups=8)), (8, 6, 6)) == 6 * 6 * 8 * 25

    def test_a_linear_layer_is_counted_once(self) -> None:
        """On `meta` it runs as a product in Python, which ptflops counts again if it may."""
        found = count_module(_meta(nn.Linear(16, 4)), (7, 16))
        assert found.macs == 7 * 16 * 4
        assert found.paper == 7 * (16 * 4 + 4)

    def test_the_paper_counts_an_activation_twice_and_a_normalisation_with_weights_twice(self) -> None:
        plain = count_module(_meta(nn.Conv2d(3, 8, 1, bias=False)), (3, 4, 4))
        more = count_module(_meta(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()), (3, 4, 4))
        assert more.macs == plain.macs
        assert more.paper - plain.paper == 2 * 8 * 16 + 2 * 8 * 16

    def test_frozen_parameters_are_not_learned(self) -> None:
        module = _meta(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1))
        module[0].requires_grad_(False)  # type: ignore[index]
        assert count_module(module, (3, 4, 4)).params == 8 * 2 + 2

    def test_says_nothing_and_leaves_torch_as_it_was(self) -> None:
        relu, add = torch.nn.functional.relu, torch.Tensor.add
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            count_paper_operations(_meta(nn.Conv2d(3, 8, 1), nn.ReLU()), (3, 4, 4))
        assert said.getvalue() == ""
        assert torch.nn.functional.relu is relu
        assert torch.Tensor.add is add

    def test_a_module_that_cannot_run_is_named(self) -> None:
        with pytest.raises(UsageError, match="wrong one: ptflops cannot count it"):
            count_paper_operations(_meta(nn.Conv2d(5, 8, 1)), (3, 4, 4), "wrong one")


class TestBackbones:
    def test_resnet18_at_160x192_is_the_sum_of_its_convolutions(self) -> None:
        found = count_backbone("resnet18", (160, 192))
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
        assert found.counts.macs == macs
        assert found.counts.params == params
        assert (found.num_features, found.grid) == (512, (5, 6))

    def test_a_14x14_grid_is_four_times_the_convolutions(self) -> None:
        assert count_backbone("resnet18", (448, 448)).grid == (14, 14)
        assert backbone_macs("resnet18", (448, 448)) == 4 * backbone_macs("resnet18", (224, 224))

    def test_an_added_layer_is_counted(self) -> None:
        class Longer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = backbones.build("resnet18", device="meta")
                self.extra = nn.Conv2d(512, 512, 1, bias=False, device="meta")

            def forward(self, images: Tensor) -> Tensor:
                result: Tensor = self.extra(self.body(images))
                return result

        plain, longer = count_backbone("resnet18", (224, 224)).counts, count_module(Longer().eval(), (3, 224, 224))
        added = 512 * 512
        assert longer.params - plain.params == added
        assert longer.macs - plain.macs == longer.paper - plain.paper == 49 * added

    def test_a_size_that_does_not_tile_is_refused(self) -> None:
        with pytest.raises(UsageError, match="multiples of its stride 32"):
            count_backbone("resnet18", (100, 224))
