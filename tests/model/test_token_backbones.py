"""timm's transformers as backbones: a cell is a patch's token, in the network, in ONNX Runtime and in records."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image

import opal_deploy
from opal_deploy.errors import UsageError
from opal_deploy.model import backbones, token_backbones
from opal_deploy.model.checkpoint import load
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.receptive_field import compute_receptive_field
from opal_deploy.nn import save_checkpoint
from opal_deploy.synthetic import example_images


# two sizes of the same weights: positions are interpolated; vit3 has register tokens, DINOv3 rotary positions
@pytest.mark.parametrize(
    ("name", "stride"), [("test_vit", 16), ("test_vit3", 16), ("deit_tiny_distilled_patch16_224", 16)]
)
def test_a_cell_is_the_token_of_its_patch_under_timms_names(name, stride, tmp_path):
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
        ("beit_base_patch16_224", 768, 16),
    ],
)
def test_the_grid_of_networks_that_people_use(name, features, stride):
    assert token_backbones.find_tokens(name) == (features, stride)
    backbone = backbones.build(f"timm:{name}", input_size=(224, 224), device="meta").eval()
    with torch.no_grad():
        found = backbone(torch.empty(1, 3, 224, 224, device="meta"))
    assert found.shape == (1, features, 224 // stride, 224 // stride)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: backbones.build("timm:test_vit", stride=8),
            "a transformer has cells of 16 pixels only; leave --stride",
        ),
        (lambda: backbones.build_classifier("timm:test_vit", 3), "the plain head takes convolutional networks"),
        (lambda: backbones.build("timm:test_vit", input_size=(8, 8)), "timm:test_vit"),
    ],
)
def test_what_a_transformer_cannot_do_is_refused_in_one_line(build, message):
    with pytest.raises(UsageError, match=message):
        build().grid((8, 8))


def test_an_exported_transformer_answers_as_the_float64_network(tmp_path):
    torch.manual_seed(0)
    head = HeadConfig(prototypes_per_class=3)
    network = OpalNetwork(NetworkConfig("timm:test_vit", 4, (96, 96), head)).eval()
    path = save_checkpoint(network, ("ash", "birch", "elm", "oak"), tmp_path / "vit.pt")
    exported = opal_deploy.export_model(path).path
    pictures = example_images(5, 96, 96)
    mean, std = (torch.tensor(values).double().reshape(3, 1, 1) for values in (network.config.mean, network.config.std))
    images = (torch.from_numpy(pictures).permute(0, 3, 1, 2).double() / 255 - mean) / std
    with torch.no_grad():
        expected = load(path).network.double().eval().explain(images)
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    logits, cells, scores = session.run(["logits", "argmax", "scores"], {"images": pictures})
    np.testing.assert_allclose(logits, expected.logits, atol=1e-5)
    np.testing.assert_allclose(scores, expected.scores, atol=1e-5)
    assert (cells == expected.argmax.numpy()).mean() > 0.95
    answer = opal_deploy.load(exported, threads=1).predict(Image.fromarray(pictures[0]))
    row, col = answer.record.evidence[0].cell
    assert answer.slots[0].box == (16 * col, 16 * row, 16 * (col + 1), 16 * (row + 1))
