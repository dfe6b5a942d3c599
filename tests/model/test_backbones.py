"""Backbones: cut where torchvision pools, whatever the network; real weights give the real network's outputs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model import backbones
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork

# name, D; all of them have 32 pixels a cell
PAPERS = [
    ("resnet50", 2048),
    ("resnet101", 2048),
    ("resnet152", 2048),
    ("efficientnet_v2_s", 1280),
    ("efficientnet_v2_m", 1280),
    ("efficientnet_v2_l", 1280),
    ("convnext_tiny", 768),
    ("convnext_small", 768),
    ("convnext_base", 1024),
]
OTHERS = [
    ("resnet18", 512),
    ("mobilenet_v2", 1280),
    ("mobilenet_v3_small", 576),
    ("efficientnet_b0", 1280),
    ("regnet_y_400mf", 440),
    ("densenet121", 1024),
    ("shufflenet_v2_x0_5", 1024),
]
SMALL = "shufflenet_v2_x0_5"
# to trace them takes many seconds
LARGE = {
    "densenet121",
    "resnet101",
    "resnet152",
    "efficientnet_v2_s",
    "efficientnet_v2_m",
    "efficientnet_v2_l",
    "convnext_small",
    "convnext_base",
}


@contextmanager
def _pooling_intercepted(pooled: list[Tensor]) -> Iterator[None]:
    """Record what every global pooling is given, whichever way the network writes it."""
    functional = torch.nn.functional
    pool, mean = functional.adaptive_avg_pool2d, Tensor.mean

    def noted_pool(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pooled.append(input)
        return pool(input, *args, **kwargs)

    def noted_mean(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.ndim == 4:
            pooled.append(self)
        return mean(self, *args, **kwargs)

    functional.adaptive_avg_pool2d = noted_pool
    Tensor.mean = noted_mean
    try:
        yield
    finally:
        functional.adaptive_avg_pool2d = pool
        Tensor.mean = mean


def _whole_network(name: str, backbone: backbones.Backbone) -> nn.Module:
    """torchvision's own, with the backbone's weights."""
    whole: nn.Module = torchvision.models.get_model(name, weights=None)
    missing, unexpected = whole.load_state_dict(backbone.body.state_dict(), strict=False)
    assert not unexpected
    assert all(key.startswith(("fc.", "classifier.")) for key in missing)
    return whole.eval()


@pytest.mark.parametrize(
    ("name", "num_features"),
    [pytest.param(*row, marks=[pytest.mark.slow] if row[0] in LARGE else [], id=row[0]) for row in (*PAPERS, *OTHERS)],
)
def test_features_are_what_torchvision_pools(name, num_features):
    torch.manual_seed(0)
    backbone = backbones.build(name).eval()
    whole = _whole_network(name, backbone)
    images = torch.randn(1, 3, 64, 96)
    pooled: list[Tensor] = []
    with torch.no_grad():
        features = backbone(images)
        with _pooling_intercepted(pooled):
            whole(images)
    assert features.shape == (1, num_features, 2, 3)
    assert (backbone.num_features, backbone.stride) == (num_features, 32)
    # squeeze-and-excite blocks pool too; the last pooling is the classifier's
    torch.testing.assert_close(features, pooled[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "num_features"),
    [
        *(pytest.param(*row, id=row[0]) for row in PAPERS),
        pytest.param("convnext_large", 1536, marks=pytest.mark.slow),
    ],
)
def test_a_backbone_on_meta_knows_its_width_and_stride(name, num_features):
    backbone = backbones.build(name, device="meta")
    assert (backbone.num_features, backbone.stride) == (num_features, 32)
    assert {p.device.type for p in backbone.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["vit_b_16", "alexnet", "squeezenet1_0", "inception_v3"])
def test_a_network_without_cells_that_tile_is_refused_by_name(name):
    with pytest.raises(UsageError) as refusal:
        backbones.build(name, device="meta")
    assert name in str(refusal.value)
    assert "resnet18" in str(refusal.value), "a name that works is missing"
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "says"), [("resnet49", "resnet50"), ("fasterrcnn_resnet50_fpn", "no such classifier")]
)
def test_an_unknown_name_is_refused_with_those_near_it(name, says):
    with pytest.raises(UsageError, match=says):
        backbones.build(name)


def test_names_are_torchvisions_classifiers():
    found = backbones.list_backbones()
    assert {name for name, _ in (*PAPERS, *OTHERS)} <= set(found)
    assert not [name for name in found if re.search("rcnn|fcn|deeplab|raft|r3d", name)]


def test_the_largest_network_costs_no_memory_on_meta():
    # RegNet's builder computes with tensors' values, which meta has none of
    model = backbones.build_torchvision_model("regnet_y_128gf", "meta")
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"meta"}


class TestInputSize:
    @pytest.mark.parametrize(
        ("size", "grid"), [((224, 224), (7, 7)), ((32, 32), (1, 1)), ((64, 96), (2, 3)), ((448, 224), (14, 7))]
    )
    def test_multiples_of_the_stride_give_the_grid(self, size, grid):
        backbone = backbones.build("resnet18", device="meta").eval()
        assert backbone.grid(size) == grid
        assert backbone(torch.empty(1, 3, *size, device="meta")).shape[2:] == grid

    def test_other_sizes_are_refused(self):
        backbone = backbones.build("resnet18", device="meta")
        for size in ((225, 224), (224, 100), (0, 32), (16, 32), (-32, 32)):
            with pytest.raises(UsageError, match="multiples of its stride 32"):
                backbone.grid(size)

    def test_a_network_knows_its_grid_before_its_first_picture(self):
        network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 3, (64, 96))).eval()
        assert network.grid == (2, 3)
        with torch.no_grad():
            found = network.explain(torch.zeros(2, 3, 64, 96))
        assert found.attention is not None
        assert found.attention.shape == (2, 15, 2, 3)

    def test_a_network_refuses_a_size_that_does_not_tile(self):
        with pytest.raises(UsageError, match="65x64"):
            OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 3, (65, 64)))


@pytest.fixture(scope="module")
def backbone() -> backbones.Backbone:
    torch.manual_seed(0)
    return backbones.build("convnext_tiny")


class TestStochasticDepth:
    @pytest.mark.parametrize("training", [True, False])
    def test_it_is_active_in_training_only(self, backbone, training):
        images = torch.randn(8, 3, 32, 32)
        backbone.train(training)
        with torch.no_grad():
            assert torch.equal(backbone(images), backbone(images)) is not training

    def test_batch_statistics_move_only_in_training(self):
        backbone = backbones.build("shufflenet_v2_x0_5")
        before = {k: v.clone() for k, v in backbone.state_dict().items() if k.endswith("running_mean")}
        with torch.no_grad():
            backbone.eval()(torch.randn(2, 3, 64, 64))
            assert all(torch.equal(backbone.state_dict()[k], v) for k, v in before.items())
            backbone.train()(torch.randn(2, 3, 64, 64))
        assert not all(torch.equal(backbone.state_dict()[k], v) for k, v in before.items())


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(torchvision.models.get_model(SMALL, weights=None).state_dict())


class TestWeightFiles:
    @pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
    def test_torchvisions_state_dict_loads_whole(self, state, tmp_path, suffix):
        path = tmp_path / f"w{suffix}"
        if suffix == ".pth":
            torch.save(state, path)
        else:
            from safetensors.torch import save_file

            save_file({k: v.contiguous() for k, v in state.items()}, path)
        backbone = backbones.build(SMALL)
        assert backbones.load_weights(backbone, path) == path.name
        assert all(torch.equal(value, state[key]) for key, value in backbone.body.state_dict().items())

    def test_float16_weights_become_float32(self, state, tmp_path):
        path = tmp_path / "w.pth"
        torch.save({k: v.half() if v.is_floating_point() else v for k, v in state.items()}, path)
        backbone = backbones.build(SMALL)
        backbones.load_weights(backbone, path)
        assert {p.dtype for p in backbone.parameters()} == {torch.float32}

    def test_missing_unexpected_and_misshapen_keys_are_all_listed(self, state, tmp_path):
        wrong = dict(state)
        del wrong["conv1.0.weight"], wrong["conv5.0.weight"]
        wrong["extra.a"], wrong["extra.b"] = torch.zeros(1), torch.zeros(1)
        wrong["conv5.1.bias"] = torch.zeros(3)
        path = tmp_path / "w.pth"
        torch.save(wrong, path)
        with pytest.raises(CheckpointError) as refusal:
            backbones.load_weights(backbones.build(SMALL), path)
        for key in ("conv1.0.weight", "conv5.0.weight", "extra.a", "extra.b", "conv5.1.bias [3]"):
            assert key in str(refusal.value)

    def test_another_networks_weights_are_refused(self, state, tmp_path):
        path = tmp_path / "w.pth"
        torch.save(state, path)
        with pytest.raises(CheckpointError, match="does not fit resnet18"):
            backbones.load_weights(backbones.build("resnet18"), path)

    def test_a_name_that_is_neither_a_file_nor_torchvisions_is_refused_with_the_known_ones(self):
        with pytest.raises(UsageError, match="IMAGENET1K_V1"):
            backbones.load_weights(backbones.build(SMALL), "IMAGENET99K")

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(UsageError, match=r"nowhere\.pth"):
            backbones.load_weights(backbones.build(SMALL), tmp_path / "nowhere.pth")

    def test_a_damaged_safetensors_file_is_refused(self, tmp_path):
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"\xff" * 100)
        with pytest.raises(CheckpointError, match="safetensors"):
            backbones.load_weights(backbones.build(SMALL), path)


def _imagenet_input(path: Path) -> Tensor:
    """ImageNet's evaluation preprocessing, as the golden logits were made: not this project's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(path).convert("RGB")
    width, height = image.size
    scale = 256 / min(width, height)
    image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    pixels = torch.from_numpy(np.asarray(image.crop((left, top, left + 224, top + 224))).copy())
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((pixels.float() / 255 - mean) / std).permute(2, 0, 1)


@pytest.mark.data
@pytest.mark.parametrize(
    ("weights", "name", "count"),
    [
        ("resnet18_ktb_small", "resnet18", 64),
        ("resnet50_pqf_large", "resnet50", 16),
        # as plain torchvision, without TensorFlow's SAME padding: what this project runs
        ("mobilenet_v2_coral_int8", "mobilenet_v2", 16),
        pytest.param("resnet50_pqf_large", "resnet50", 64, marks=pytest.mark.slow),
        pytest.param("mobilenet_v2_coral_int8", "mobilenet_v2", 64, marks=pytest.mark.slow),
    ],
)
def test_real_weights_give_the_golden_logits(weights, name, count, shared_weights, imagenet_samples):
    golden = np.load(imagenet_samples / "golden_logits.npz", allow_pickle=False)
    path = shared_weights / f"{weights}.safetensors"
    backbone = backbones.build(name).eval()
    backbones.load_weights(backbone, path)
    state = backbones.read_state_dict(path)
    dense = "fc" if name.startswith("resnet") else "classifier.1"
    weight, bias = state[f"{dense}.weight"].float(), state[f"{dense}.bias"].float()
    found = []
    with torch.no_grad():
        for start in range(0, count, 16):
            files = golden["files"][start : start + 16]
            features = backbone(torch.stack([_imagenet_input(imagenet_samples / str(file)) for file in files]))
            found.append(features.mean((2, 3)) @ weight.T + bias)
    np.testing.assert_allclose(torch.cat(found).numpy(), golden[weights][:count], rtol=1e-3, atol=1e-4)
