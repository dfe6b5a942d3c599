"""Loaded models: the same network in every runtime, described truthfully."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.bench import networks
from opal_deploy.bench.measurement import Target
from opal_deploy.bench.models import load_model
from opal_deploy.bench.networks import build_networks, build_random_network, load_checkpoint_network
from opal_deploy.bench.options import SweepOptions
from opal_deploy.errors import ArtifactError, OpalError, UsageError
from opal_deploy.runtime.devices import Driver
from opal_deploy.synthetic import example_images

CPU = SweepOptions(device="cpu", threads=1, runtime="onnxruntime")
EAGER = replace(CPU, runtime="eager")
TINY = SweepOptions(backbone="shufflenet_v2_x0_5", size=(64, 64), classes=3)


@pytest.fixture(scope="module")
def network(exact_model):
    return load_checkpoint_network(exact_model.with_suffix(".pt"))


@pytest.fixture(scope="module")
def eager(network):
    return load_model(network, EAGER)


@pytest.fixture(scope="module")
def images():
    return example_images(3, 96, 96)


@pytest.mark.parametrize(("setup", "tolerance"), [(EAGER, 1e-4), (CPU, 1e-5)], ids=["PyTorch", "ONNX Runtime"])
def test_a_network_is_that_of_the_exported_file(network, exact_session, images, setup, tolerance):
    session = load_model(network, setup).session
    outputs, expected = session.run(images), exact_session.run(images)
    np.testing.assert_allclose(outputs.logits, expected.logits, atol=tolerance)
    np.testing.assert_allclose(outputs.scores, expected.scores, atol=tolerance)
    assert outputs.argmax.dtype == np.int32
    assert (outputs.argmax == expected.argmax).mean() > 0.97
    assert session.metadata.unverified == ("exported with --no-verify" if setup is CPU else "")
    assert session.metadata.outputs == ("logits", "argmax", "scores")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_rounds_the_backbone(network, eager, images, precision):
    outputs = load_model(network, replace(EAGER, precision=precision)).session.run(images)
    assert outputs.logits.dtype == np.float32
    assert 0 < np.abs(outputs.logits - eager.session.run(images).logits).max() < 0.1
    assert all(p.dtype == torch.float32 for p in network.checkpoint.network.parameters())


def test_a_target_is_described(network, eager, exact_model):
    checkpoint = exact_model.with_suffix(".pt")
    assert load_model(network, replace(CPU, precision="fp16")).target.precision == "fp16"
    assert eager.target == Target(
        "exact.pt", "timm:test_resnet", "opal", "torch eager", eager.session.description, "cpu", "fp32", "uint8 NHWC",
        (96, 96), 4, 3, compute_sha256(checkpoint),
    )  # fmt: skip
    file = load_model(exact_model, CPU)
    assert (file.target.sha256, file.target.runtime, file.threads) == (compute_sha256(exact_model), "onnxruntime", 1)
    compiled = load_model(checkpoint, replace(CPU, runtime="compile"))
    assert (compiled.target.runtime, compiled.target.options) == ("torch compile", "freezing")
    assert "to logits, argmax, scores in host memory" in file.describe_timing(1)


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    a, b = (build_random_network("shufflenet_v2_x0_5", num_classes=3, size=(64, 64)) for _ in range(2))
    assert torch.rand(1) == expected
    states = (n.checkpoint.network.state_dict().values() for n in (a, b))
    assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))
    assert (a.name, a.sha256) == ("shufflenet_v2_x0_5 + opal", None)


def test_each_stride_and_head_of_a_backbone_is_a_network_of_its_own():
    options = replace(TINY, stride=(32, 16), keep_layers=True, head=("linear", "opal"))
    assert [network.name for network in build_networks(options)] == [
        f"shufflenet_v2_x0_5, {cells} + {head}"
        for cells in ("stride 32", "stride 16, all layers")
        for head in ("linear", "opal")
    ]
    with pytest.raises(UsageError, match="plain head"):
        build_networks(replace(TINY, stride=(16,), head="plain"))


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (replace(CPU, precision="tf32"), "tf32"),
        (replace(CPU, precision="bf16"), "bf16 is timed from a file"),
        (replace(EAGER, precision="tf32"), "CPUs have no precision tf32"),
        (replace(EAGER, precision="int8"), "PyTorch has no precision int8"),
        (replace(EAGER, cuda_graphs=True), "--cuda-graphs"),
        (replace(CPU, runtime="compile", cuda_graphs=True), "--cuda-graphs"),
        (replace(EAGER, device="tpu"), "expected auto, cpu, cuda"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setup_that_does_not_fit_is_refused_in_one_line(network, setup, message):
    with pytest.raises(UsageError, match=message) as error:
        load_model(network, setup)
    assert "\n" not in str(error.value)
    assert "/tmp" not in str(error.value)


def test_other_files_precisions_and_machines_are_refused(network, exact_model, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="its precision is fp32"):
        load_model(exact_model, replace(CPU, precision="fp16"))
    with pytest.raises(ArtifactError, match="no such model"):
        load_model(tmp_path / "missing.onnx", CPU)
    monkeypatch.setattr(networks, "visible_driver", lambda: Driver(problem="no driver"))
    with pytest.raises(OpalError, match="no GPU here"):
        load_model(network, replace(CPU, runtime="tensorrt"))
