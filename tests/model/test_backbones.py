"""Backbones: cut where torchvision pools, whatever the network; real weights give the real network's outputs."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model import backbones, state_dicts
from opal_deploy.model.config import PLAIN_CLASSIFIER, NetworkConfig
from opal_deploy.model.network import OpalNetwork

SMALL = "shufflenet_v2_x0_5"


# the last feature maps before the next stage: where a shortcut goes around a convolution, the sum before it
FINER = [
    ("resnet50", 16, "layer3"), ("resnet50", 8, "layer2"), ("convnext_tiny", 16, "features.6.0"),
    ("efficientnet_v2_s", 16, "features.6.0.block.0"), ("efficientnet_v2_s", 4, "features.2"),
    ("densenet121", 16, "features.transition3.conv"), (SMALL, 8, "stage2"), ("vgg11", 16, "features.19"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stride", "layer"), FINER)
def test_a_finer_stride_ends_at_the_last_feature_map_before_the_next_stage(name, stride, layer):
    torch.manual_seed(0)
    backbone = backbones.build(name, stride=stride).eval()
    with torch.device("meta"):  # what lies behind the body runs with any values
        whole = torchvision.models.get_model(name, weights=None).to_empty(device="cpu").eval()
    whole.load_state_dict(backbone.body.state_dict(), strict=False)
    images, outputs = torch.randn(1, 3, 64, 96), []
    whole.get_submodule(layer).register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        features = backbone(images)
        whole(images)
    assert features.shape == (1, backbone.num_features, 64 // stride, 96 // stride)
    assert backbone.grid((64, 96)) == features.shape[2:]
    torch.testing.assert_close(features, outputs[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "stride"), [("resnet18", 8), (SMALL, 16), ("timm:resnet50d", 16)])
def test_kept_layers_are_stacked_on_the_finer_map(name, stride):
    backbone = backbones.build(name, stride=stride, keep_layers=True).eval()
    whole, cut = (backbones.build(name, stride=size).eval() for size in (None, stride))
    for other in (whole, cut):
        other.body.load_state_dict(backbone.body.state_dict(), strict=False)
    # all parameters of the library's network, under its names
    assert backbone.body.state_dict().keys() == whole.body.state_dict().keys()
    images = torch.randn(2, 3, 64, 80)
    with torch.no_grad():
        finer, last = cut(images), whole(images)
        upsampled = nn.functional.interpolate(last, finer.shape[2:], mode="bilinear")
        torch.testing.assert_close(backbone(images), torch.cat([finer, upsampled], 1), rtol=1e-5, atol=1e-6)
    assert backbone.grid((64, 80)) == finer.shape[2:]
    assert backbone.num_features == cut.num_features + whole.num_features


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"stride": 32, "keep_layers": True}, "ends at stride 32"),
        ("resnet18", {"keep_layers": True}, "only with --stride"), ("resnet18", {"stride": 12}, "32, 16"),
        # without cells that tile the image: refused with a name that works
        *((name, {}, f"{name}.*resnet18") for name in ("vit_b_16", "alexnet", "inception_v3")),
        ("resnet49", {}, "resnet50"), ("fasterrcnn_resnet50_fpn", {}, "no such classifier"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_in_one_line(name, options, message):
    with pytest.raises(UsageError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        backbones.build(name, device="meta", **options)


def test_multiples_of_the_stride_give_the_grid_and_others_are_refused():
    backbone = backbones.build("resnet18", device="meta").eval()
    for size, grid in {(224, 224): (7, 7), (32, 32): (1, 1), (64, 96): (2, 3), (448, 224): (14, 7)}.items():
        assert backbone.grid(size) == grid
        assert backbone(torch.empty(1, 3, *size, device="meta")).shape[2:] == grid
    for size in ((225, 224), (224, 100), (0, 32), (16, 32), (-32, 32)):
        with pytest.raises(UsageError, match="multiples of its stride 32"):
            backbone.grid(size)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(1)
    return dict(torchvision.models.get_model(SMALL, weights=None).state_dict())


@pytest.fixture
def write(tmp_path):
    def save(state, name="w.pth"):
        torch.save(state, tmp_path / name) if name.endswith(".pth") else save_file(state, tmp_path / name)
        return tmp_path / name

    return save


class TestWeightFiles:
    @pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
    def test_torchvisions_state_dict_loads_whole(self, state, write, name):
        backbone = backbones.build(SMALL)
        assert backbones.load_weights(backbone, write(state, name)) == name
        assert all(torch.equal(value, state[key]) for key, value in backbone.body.state_dict().items())

    def test_float16_weights_become_float32(self, state, write):
        backbone = backbones.build(SMALL)
        backbones.load_weights(backbone, write({k: v.half() if v.is_floating_point() else v for k, v in state.items()}))
        assert {p.dtype for p in backbone.parameters()} == {torch.float32}

    def test_missing_unexpected_and_misshapen_keys_are_all_listed(self, state, write):
        wrong = {key: value for key, value in state.items() if key != "conv1.0.weight"}
        wrong |= {"extra.a": torch.zeros(1), "conv5.1.bias": torch.zeros(3)}
        with pytest.raises(CheckpointError, match=r"(?=.*conv1\.0\.weight)(?=.*extra\.a).*conv5\.1\.bias \[3\]"):
            backbones.load_weights(backbones.build(SMALL), write(wrong))

    def test_names_and_damaged_files_are_refused(self, tmp_path):
        backbone, damaged = backbones.build(SMALL), tmp_path / "w.safetensors"
        damaged.write_bytes(b"\xff" * 100)
        with pytest.raises(CheckpointError, match="safetensors"):
            backbones.load_weights(backbone, damaged)
        with pytest.raises(UsageError, match=r"nowhere\.pth"):
            backbones.load_weights(backbone, tmp_path / "nowhere.pth")
        with pytest.raises(UsageError, match="IMAGENET1K_V1"):  # torchvision's known ones
            backbones.load_weights(backbone, "IMAGENET99K")


# ConvNeXt has a LayerNorm behind its pooling, MobileNet-V3 a layer and dropout, timm's a convolution; NFNet
# standardises weights
NETWORKS = (
    "resnet18", "convnext_tiny", "efficientnet_v2_s", "mobilenet_v3_small", "regnet_y_400mf", SMALL,
    "timm:mobilenetv3_small_050", "timm:test_convnext", "timm:test_nfnet",
)  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_the_plain_head_is_the_networks_own_classifier_with_all_weights_but_the_classes(name, tmp_path):
    torch.manual_seed(0)
    pretrained = backbones.get_library(name).build_network(name).state_dict()
    save_file({key: value.clone() for key, value in pretrained.items()}, tmp_path / "w.safetensors")
    config = NetworkConfig(name, 7, (64, 96), PLAIN_CLASSIFIER)
    network = OpalNetwork(config, weights=tmp_path / "w.safetensors")
    state = {**network.backbone.body.state_dict(), **network.head.classifier.state_dict()}
    assert state.keys() == pretrained.keys()
    replaced = [key for key, value in state.items() if not torch.equal(value, pretrained[key])]
    assert sorted(value.shape[0] for value in map(state.get, replaced)) == [7, 7]
    with torch.device("meta"):
        whole = backbones.get_library(name).build_network(name, num_classes=7).eval()
    whole.load_state_dict(state, assign=True)
    images, backbone = torch.randn(2, 3, 64, 96), network.eval().backbone
    with torch.no_grad():
        assert backbone(images).shape == (2, backbone.num_features, 64 // backbone.stride, 96 // backbone.stride)
        outputs = network.explain(images)
        torch.testing.assert_close(outputs.logits, whole(images), rtol=1e-5, atol=1e-6)
        assert (outputs.scores, outputs.argmax, outputs.attention) == (None, None, None)
    with torch.device("meta"), pytest.raises(UsageError, match="give --stride 32"):
        OpalNetwork(replace(config, stride=16))


def test_a_copy_is_in_the_modes_of_the_original():
    """torchvision's copies of a cut network are in training mode, with the graph of that mode."""
    network = OpalNetwork(NetworkConfig("efficientnet_b0", 3, (32, 32)), weights=None).eval()
    images = torch.randn(2, 3, 32, 32)
    copied = copy.deepcopy(network)
    assert not any(module.training for module in copied.modules())
    assert torch.equal(copied(images), network(images))
    frozen = network.train().backbone.body.get_submodule("features.0").eval()
    modes = {name: module.training for name, module in copy.deepcopy(network).named_modules()}
    assert modes == {name: module.training for name, module in network.named_modules()}
    assert not frozen.training
    # in training mode stochastic depth is drawn anew each time, of the copy as of the original; of two images no block
    # is left out in one of fifty draws
    images = torch.randn(64, 3, 32, 32)
    assert not torch.equal(copied.train()(images), copied(images))


# ImageNet's evaluation preprocessing, as the first golden logits were made: not this project's own
IMAGENET_INPUT = Compose(
    [Resize(256), CenterCrop(224), ToTensor(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
)


@pytest.mark.data
@pytest.mark.parametrize(
    ("weights", "name", "dense"),
    [
        ("resnet50_pqf_large", "resnet50", "fc"),
        # as plain torchvision, without TensorFlow's SAME padding: what this project runs
        ("mobilenet_v2_coral_int8", "mobilenet_v2", "classifier.1"),
    ],
)
def test_real_weights_give_the_golden_logits(weights, name, dense, shared_weights, imagenet_samples):
    golden = np.load(imagenet_samples / "golden_logits.npz", allow_pickle=False)
    path = shared_weights / f"{weights}.safetensors"
    network = OpalNetwork(NetworkConfig(name, 1000, head=PLAIN_CLASSIFIER), weights=path).eval()
    state = state_dicts.read_state_dict(path)
    # ImageNet's own classes, which fine-tuning replaces
    classes = {key: state[key].float() for key in (f"{dense}.weight", f"{dense}.bias")}
    network.head.classifier.load_state_dict(classes, strict=False)
    photographs = [Image.open(imagenet_samples / str(file)).convert("RGB") for file in golden["files"][:3]]
    with torch.no_grad():
        logits = network(torch.stack([*map(IMAGENET_INPUT, photographs)]))
    np.testing.assert_allclose(logits, golden[weights][:3], rtol=1e-3, atol=1e-4)
