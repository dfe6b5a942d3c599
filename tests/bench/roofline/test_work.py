"""Work counted layer by layer: closed forms, and how it grows with the batch and the precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.bench.roofline.work import (
    BYTES_PER_ELEMENT,
    Layer,
    count_backbone_work,
    count_head_work,
    count_model_work,
    count_module_work,
)
from opal_deploy.errors import UsageError
from opal_deploy.model.backbones import backbone_macs
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig


def _only(module: nn.Module, shape: tuple[int, ...]) -> Layer:
    (layer,) = count_module_work(module.eval().to("meta"), shape, "one layer").layers
    return layer


class TestLayers:
    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    def test_a_convolution(self, bias: bool) -> None:
        layer = _only(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=bias), (3, 10, 12))
        weights = 8 * 3 * 9 + 8 * bias
        assert layer == Layer("one layer", "conv", 5 * 6 * 8 * 27, 3 * 10 * 12, 8 * 5 * 6, weights)

    def test_a_grouped_convolution(self) -> None:
        layer = _only(nn.Conv2d(8, 16, 3, padding=1, groups=4, bias=False), (8, 6, 6))
        assert (layer.macs, layer.weights) == (6 * 6 * 16 * 2 * 9, 16 * 2 * 9)

    def test_a_transposed_convolution(self) -> None:
        layer = _only(nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False), (4, 5, 5))
        assert (layer.macs, layer.outputs) == (5 * 5 * 4 * 6 * 4, 6 * 10 * 10)

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    def test_a_linear_layer(self, bias: bool) -> None:
        layer = _only(nn.Linear(16, 4, bias=bias), (16,))
        assert layer == Layer("one layer", "linear", 64, 16, 4, 64 + 4 * bias)

    def test_a_product_of_two_activations_has_no_weights(self) -> None:
        class Product(nn.Module):
            def forward(self, rows: Tensor) -> Tensor:
                return rows @ rows.transpose(1, 2)

        assert _only(Product(), (7, 5)) == Layer("one layer", "matmul", 7 * 7 * 5, 2 * 7 * 5, 49, 0)

    def test_is_named_for_the_module_that_ran_it(self) -> None:
        module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 2, 1))).to("meta")
        assert [layer.name for layer in count_module_work(module, (3, 4, 4), "x").layers] == ["0", "2.0"]

    def test_leaves_no_hooks_behind(self) -> None:
        module = nn.Conv2d(3, 4, 1).to("meta")
        for _ in range(2):
            assert len(count_module_work(module, (3, 4, 4), "x").layers) == 1
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class TestBytes:
    LAYER = Layer("x", "conv", macs=1000, inputs=30, outputs=20, weights=70)

    @pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("tf32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)])
    def test_activations_grow_with_the_batch_and_weights_do_not(self, precision: str, size: int) -> None:
        assert self.LAYER.bytes_moved(1, precision) == (50 + 70) * size
        assert self.LAYER.bytes_moved(8, precision) == (8 * 50 + 70) * size

    def test_intensity_rises_with_the_batch_to_that_of_the_activations(self) -> None:
        assert self.LAYER.intensity(1, "fp32") == 2 * 1000 / (120 * 4)
        assert self.LAYER.intensity(10**9, "fp32") == pytest.approx(2 * 1000 / (50 * 4))

    def test_an_unknown_precision_is_refused(self) -> None:
        with pytest.raises(UsageError, match="precision 'fp8': expected one of"):
            self.LAYER.bytes_moved(1, "fp8")


class TestNetworks:
    def test_a_backbone_has_the_macs_of_the_other_counter(self) -> None:
        for name in ("resnet18", "convnext_tiny"):
            assert count_backbone_work(name, (224, 224)).macs == backbone_macs(name, (224, 224))

    def test_the_head_is_its_projection(self) -> None:
        work = count_head_work("resnet18", 1000, HeadConfig(prototypes_per_class=3), (160, 192))
        (projection,) = work.layers
        assert projection == Layer("projection", projection.operation, 30 * 512 * 3000, 30 * 512, 30 * 3000, 3000 * 513)

    def test_the_linear_head_is_its_dense_layer(self) -> None:
        (dense,) = count_head_work("resnet18", 10, LINEAR_BASELINE, (224, 224)).layers
        assert dense == Layer("classifier", "linear", 5120, 512, 10, 5130)

    def test_both_together_are_their_sum(self) -> None:
        body, head = (
            count_backbone_work("resnet18", (224, 224)),
            count_head_work("resnet18", 9, HeadConfig(), (224, 224)),
        )
        both = body + head
        assert both.name == "resnet18 + opal"
        assert both.macs == body.macs + head.macs
        for precision in BYTES_PER_ELEMENT:
            assert both.bytes_moved(4, precision) == body.bytes_moved(4, precision) + head.bytes_moved(4, precision)
        assert both.intensity(4, "fp16") == both.flops(4) / both.bytes_moved(4, "fp16")

    def test_a_size_that_does_not_tile_is_refused(self) -> None:
        with pytest.raises(UsageError, match="multiples of its stride"):
            count_backbone_work("resnet18", (100, 100))


class TestArtifacts:
    def test_is_that_of_what_the_metadata_names(self, exact_model: Path) -> None:
        metadata = read_metadata(exact_model)
        work = count_model_work(metadata)
        assert work is not None
        body = count_backbone_work(metadata.backbone, metadata.input_size)
        assert work.macs - body.macs == body.layers[-1].outputs * metadata.num_prototypes
        assert work.name == "shufflenet_v2_x0_5 + opal"

    def test_the_linear_baseline_has_a_dense_layer(self, exact_model: Path) -> None:
        work = count_model_work(replace(read_metadata(exact_model), head=LINEAR_BASELINE.to_dict()))
        assert work is not None
        assert work.name == "shufflenet_v2_x0_5 + linear"
        assert work.layers[-1].outputs == 4

    def test_of_a_backbone_that_is_not_there_is_none(self, exact_model: Path) -> None:
        assert count_model_work(replace(read_metadata(exact_model), backbone="resnet17")) is None

    def test_is_none_without_torch(self, exact_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        monkeypatch.setitem(sys.modules, "torchvision", None)
        assert count_model_work(read_metadata(exact_model)) is None
        assert torch.is_grad_enabled()
