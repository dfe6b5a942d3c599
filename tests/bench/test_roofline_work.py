"""Work counted layer by layer: closed forms, and how it grows with the batch and the precision."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

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
from opal_deploy.model.config import LINEAR_BASELINE, PLAIN_CLASSIFIER, HeadConfig


class Product(nn.Module):
    """A product of two activations."""

    def forward(self, rows):
        return rows @ rows.transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Conv2d(3, 8, 3, 2, 1), (3, 10, 12), Layer("x", "conv", 30 * 8 * 27, 360, 240, 8 * 28)),
        (nn.Conv2d(3, 8, 3, 2, 1, bias=False), (3, 10, 12), Layer("x", "conv", 30 * 8 * 27, 360, 240, 8 * 27)),
        (nn.Conv2d(8, 16, 3, padding=1, groups=4, bias=False), (8, 6, 6),
         Layer("x", "conv", 36 * 16 * 2 * 9, 288, 576, 16 * 2 * 9)),
        (nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False), (4, 5, 5),
         Layer("x", "conv", 25 * 4 * 6 * 4, 100, 600, 4 * 6 * 4)),
        (nn.Linear(16, 4), (16,), Layer("x", "linear", 64, 16, 4, 68)),
        (nn.Linear(16, 4, bias=False), (16,), Layer("x", "linear", 64, 16, 4, 64)),
        (Product(), (7, 5), Layer("x", "matmul", 7 * 7 * 5, 2 * 7 * 5, 49, 0)),
    ],
    ids=["convolution", "without bias", "grouped", "transposed", "linear", "linear without bias", "matmul"],
)  # fmt: skip
def test_a_layer_is_its_closed_form(module, shape, expected):
    assert count_module_work(module.eval().to("meta"), shape, "x").layers == (expected,)


def test_layers_are_named_for_their_modules_and_no_hooks_stay_behind():
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 2, 1))).to("meta")
    for _ in range(2):
        assert [layer.name for layer in count_module_work(module, (3, 4, 4), "x").layers] == ["0", "2.0"]
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_activations_grow_with_the_batch_and_weights_do_not():
    layer = Layer("x", "conv", macs=1000, inputs=30, outputs=20, weights=70)
    for precision, size in (("fp32", 4), ("tf32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)):
        assert layer.bytes_moved(1, precision) == (50 + 70) * size
        assert layer.bytes_moved(8, precision) == (8 * 50 + 70) * size
    # the intensity rises to that of the activations
    assert layer.intensity(1, "fp32") == 2 * 1000 / (120 * 4)
    assert layer.intensity(10**9, "fp32") == pytest.approx(2 * 1000 / (50 * 4))
    with pytest.raises(UsageError, match="precision 'fp8': expected one of"):
        layer.bytes_moved(1, "fp8")


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny"])
def test_a_backbone_has_the_macs_of_the_other_counter(name):
    assert count_backbone_work(name, (224, 224)).macs == backbone_macs(name, (224, 224))


def test_a_head_is_its_projection_or_its_dense_layer_and_a_network_the_sum():
    work = count_head_work("resnet18", 1000, HeadConfig(prototypes_per_class=3), (160, 192))
    (projection,) = work.layers
    macs, inputs, outputs = 30 * 512 * 3000, 30 * 512, 30 * 3000
    assert projection == Layer("projection", projection.operation, macs, inputs, outputs, 3000 * 513)
    (dense,) = count_head_work("resnet18", 10, LINEAR_BASELINE, (224, 224)).layers
    assert dense == Layer("classifier", "linear", 5120, 512, 10, 5130)
    (own,) = count_head_work("resnet18", 10, PLAIN_CLASSIFIER, (224, 224)).layers
    assert replace(own, name="classifier") == dense
    body = count_backbone_work("resnet18", (160, 192))
    both = body + work
    assert (both.name, both.macs) == ("resnet18 + opal", body.macs + macs)
    for precision in BYTES_PER_ELEMENT:
        assert both.bytes_moved(4, precision) == body.bytes_moved(4, precision) + work.bytes_moved(4, precision)
    assert both.intensity(4, "fp16") == both.flops(4) / both.bytes_moved(4, "fp16")


def test_an_artifact_is_what_its_metadata_names(exact_model):
    metadata = read_metadata(exact_model)
    work = count_model_work(metadata)
    linear = count_model_work(replace(metadata, head=LINEAR_BASELINE.to_dict()))
    assert work
    assert linear
    body = count_backbone_work(metadata.backbone, metadata.input_size)
    assert work.macs - body.macs == body.layers[-1].outputs * metadata.num_prototypes
    assert (work.name, linear.name) == ("shufflenet_v2_x0_5 + opal", "shufflenet_v2_x0_5 + linear")
    assert linear.layers[-1].outputs == 4
    rows, cols = (side // 16 for side in metadata.input_size)
    finer = count_model_work(replace(metadata, grid=(rows, cols), keep_layers=True))
    assert finer
    # the same layers, the last of them on four times the cells
    assert finer.weights == work.weights
    assert finer.layers[-1].macs == 4 * work.layers[-1].macs


def test_an_artifact_that_cannot_be_built_here_has_no_work(exact_model, monkeypatch):
    metadata = read_metadata(exact_model)
    assert count_model_work(replace(metadata, backbone="resnet17")) is None
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert count_model_work(metadata) is None
    assert torch.is_grad_enabled()
