"""Theoretical receptive fields: those of the operations are where gradients can be, in every kind of network."""

import pytest
import torch
from torch import nn

from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.model import backbones
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.receptive_field import compute_receptive_field


def find_gradients(backbone, side):
    """Return a middle cell and the first and last input column that its features depend on."""
    for name, module in list(backbone.body.named_modules()):
        # the maximum passes the gradient of one pixel only
        if isinstance(module, nn.MaxPool2d):
            window = nn.AvgPool2d(module.kernel_size, module.stride, module.padding, module.ceil_mode)
            backbone.body.set_submodule(name, window)
    backbone.eval().double()
    with torch.no_grad():
        for weight in backbone.parameters():
            # nothing cancels out, and nothing grows without bound
            weight.abs_().add_(1e-3).div_(weight[0].numel())
    images = torch.rand(1, 3, side, side, dtype=torch.float64, requires_grad=True)
    features = backbone(images)
    cell = features.shape[3] // 2
    (gradient,) = torch.autograd.grad(features[0, :, cell, cell].sum(), images)
    columns = (gradient != 0).any(dim=(0, 1, 2)).nonzero().flatten()
    return cell, int(columns[0]), int(columns[-1])


@pytest.mark.parametrize(
    ("name", "stride", "size", "offset"),
    [
        ("resnet18", 16, 211, 0.5),
        ("convnext_tiny", 8, 224, 4.0),  # windows of an even side: its fields lie around its boxes
        ("googlenet", 16, 235, 14.5),  # pooling that rounds up
    ],
)
def test_gradients_reach_as_far_as_the_operations_allow(name, stride, size, offset):
    backbone = backbones.build(name, stride=stride)
    assert compute_receptive_field(backbone, (224, 224)) == ReceptiveField(stride, size, offset)
    cell, first, last = find_gradients(backbone, (size // stride + 5) * stride)
    assert ((first + last + 1) / 2 - cell * stride, last - first + 1) == (offset, size)


def test_cells_of_an_upsampled_map_reach_two_of_its_cells():
    backbone = backbones.build("shufflenet_v2_x0_5", stride=16, keep_layers=True)
    field = compute_receptive_field(backbone, (224, 224))
    ends = []
    for side in (40 * 16, 42 * 16):  # the cell in the middle is an even one, then an odd one
        cell, first, last = find_gradients(backbone, side)
        ends.append((first - cell * 16, last + 1 - cell * 16))
    assert (min(first for first, _ in ends), max(last for _, last in ends)) == (
        field.offset - field.size / 2, field.offset + field.size / 2
    )  # fmt: skip


def test_pooling_inside_the_network_is_told_apart_from_the_windows():
    field = compute_receptive_field(backbones.build("efficientnet_b0", stride=8, device="meta"), (224, 224))
    assert (field.size, field.global_context) == (67, True)


def test_attention_between_cells_has_no_bound():
    field = compute_receptive_field(backbones.build("swin_t", device="meta"), (224, 224))
    assert (field.size, field.offset) == (None, None)
    assert field.sees_whole((10_000, 10_000))


def test_padding_outside_the_convolution_shifts_the_field():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3, stride=2)

        def forward(self, images):
            return {"features": self.convolution(nn.functional.pad(images, [0, 1, 0, 1]))}

    field = compute_receptive_field(Backbone("padded", Padded(), (4,), 2), (8, 8))
    assert field == ReceptiveField(2, 3, 1.5)
