"""timm's networks as backbones: cut at `forward_features()` or by stride; a transformer's cell is a patch's token."""

import pytest
import timm
import torch

import opal_deploy
from opal_deploy.artifact import onnx_file
from opal_deploy.errors import MissingExtra, UsageError
from opal_deploy.model import backbones, state_dicts, timm_backbones
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.feature_graph import Cut
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.receptive_field import compute_receptive_field
from opal_deploy.nn import save_checkpoint

LITE0 = "timm:tf_efficientnet_lite0"


def test_synchronised_batch_norm_keeps_the_activations_that_timm_puts_into_it():
    network = backbones.build(LITE0, stride=8).eval()
    with torch.no_grad():
        converted = timm_backbones.convert_sync_batch_norm(network)
    norms = [module for module in converted.modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    assert norms
    assert any(isinstance(norm.act, torch.nn.ReLU6) for norm in norms)


@pytest.mark.parametrize(
    ("name", "stride", "message"),
    [
        ("vit_tiny_patch16_224", 8, "cells have 16 pixels"), ("levit_128", None, "fails on 448x448"),
        ("mambaout_femto", None, "no grid"), ("hrnet_w18_small", 16, "has 32, 4, 2"),
        ("resnt18", None, "did you mean resnet18"), ("resnet18.a7_in1k", None, "it has a1_in1k"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_one_line(name, stride, message):
    with pytest.raises(UsageError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        backbones.build(f"timm:{name}", stride=stride, device="meta")


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"opal-deploy\[timm\]"):
        backbones.build("timm:resnet18")


class TestWeights:
    @pytest.mark.parametrize(
        ("name", "weights", "tag", "mean", "license"),
        [
            ("timm:resnet18", "any.pth", "a1_in1k", 0.485, "apache-2.0"),
            ("timm:resnet18.tv_in1k", None, "tv_in1k", 0.485, "bsd-3-clause"),
            ("timm:resnet18", "tv_in1k", "tv_in1k", 0.485, "bsd-3-clause"),
            ("timm:convnext_base", "clip_laion2b", "clip_laion2b", 0.48145466, "apache-2.0"),
        ],
    )
    def test_a_tag_decides_statistics_and_licence(self, name, weights, tag, mean, license):
        config = backbones.get_library(name).get_pretrained_config(name, weights)
        assert (config.mean[0], config.details["tag"], config.details["license"]) == (mean, tag, license)
        assert config.details["interpolation"] in ("bilinear", "bicubic")

    def test_the_default_is_the_names_own_tag_or_timms(self):
        defaults = [timm_backbones.default_weights(f"timm:{name}") for name in ("resnet18", "resnet18.tv_in1k")]
        assert defaults == ["a1_in1k", "tv_in1k"]
        with pytest.raises(UsageError, match="timm has no weights for it"):
            timm_backbones.default_weights("timm:efficientnet_b6")

    def test_a_tag_is_read_from_the_hubs_cache_and_offline_without_it_refused(
        self, lite0_weights, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        backbone = backbones.build(LITE0)
        with pytest.raises(UsageError, match=r"\A[^\n]*could not download [^\n]* give its path: --weights FILE\Z"):
            backbones.load_weights(backbone, "in1k")
        with pytest.raises(UsageError, match=r"no timm tag for tf_efficientnet_lite0 \(in1k\)"):
            backbones.load_weights(backbone, "in22k")
        # as the Hub's client keeps what it downloads
        repository = tmp_path / "models--timm--tf_efficientnet_lite0.in1k"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(lite0_weights)
        assert backbones.load_weights(backbone, "in1k") == "timm tf_efficientnet_lite0.in1k"
        state = state_dicts.read_state_dict(lite0_weights)
        assert all(torch.equal(value, state[key]) for key, value in backbone.body.state_dict().items())


# two sizes of the same weights: positions are interpolated; vit3 has register tokens, DINOv3 rotary positions
@pytest.mark.parametrize("name", ["test_vit", "test_vit3", "deit_tiny_distilled_patch16_224"])
def test_a_cell_is_the_token_of_its_patch_under_timms_names(name, tmp_path):
    torch.manual_seed(0)
    whole = timm.create_model(name, img_size=(96, 64)).eval()
    torch.save(timm.create_model(name, img_size=160).state_dict(), tmp_path / "other.pth")
    torch.save(whole.state_dict(), tmp_path / "same.pth")
    backbone = backbones.build(f"timm:{name}", input_size=(96, 64)).eval()
    backbones.load_weights(backbone, tmp_path / "other.pth")
    backbones.load_weights(backbone, tmp_path / "same.pth")
    images = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        features, tokens = backbone(images), whole.forward_features(images)[:, whole.num_prefix_tokens :]
    assert features.shape == (2, backbone.num_features, 6, 4)
    assert backbone.grid((96, 64)) == (6, 4)
    for row, col in ((0, 0), (2, 3), (5, 1)):
        torch.testing.assert_close(features[:, :, row, col], tokens[:, 4 * row + col], rtol=1e-5, atol=1e-6)
    assert compute_receptive_field(backbone, (96, 64)).size is None


@pytest.mark.parametrize(
    ("name", "features", "stride"),
    [
        ("vit_small_patch14_reg4_dinov2", 384, 14),
        ("vit_small_patch16_dinov3", 384, 16),
        ("swin_tiny_patch4_window7_224", 768, 32),
    ],
)
def test_the_grid_of_networks_that_people_use(name, features, stride):
    assert timm_backbones.find_tokens(name) == Cut("", features, stride)
    backbone = backbones.build(f"timm:{name}", input_size=(224, 224), device="meta").eval()
    with torch.no_grad():
        found = backbone(torch.empty(1, 3, 224, 224, device="meta"))
    assert found.shape == (1, features, 224 // stride, 224 // stride)


def test_what_a_transformer_cannot_do_is_refused():
    with pytest.raises(UsageError, match="plain head"):
        backbones.build_classifier("timm:test_vit", 3)
    with pytest.raises(UsageError, match="timm:test_vit"):
        backbones.build("timm:test_vit", input_size=(8, 8)).grid((8, 8))


def test_an_exported_transformer_passes_the_comparison_with_pytorch(tmp_path):
    torch.manual_seed(0)
    head = HeadConfig(prototypes_per_class=3)
    network = OpalNetwork(NetworkConfig("timm:test_vit", 4, (96, 96), head)).eval()
    path = save_checkpoint(network, ("ash", "birch", "elm", "oak"), tmp_path / "vit.pt")
    metadata = onnx_file.read_metadata(opal_deploy.export_model(path).path)
    assert (metadata.verification["passed"], metadata.grid, metadata.mean[0]) == (True, (6, 6), network.config.mean[0])
