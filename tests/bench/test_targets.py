"""Loaded models: the same network in every runtime, described truthfully."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.bench import networks
from opal_deploy.bench.measurement import Target, head_name
from opal_deploy.bench.networks import (
    build_networks,
    build_random_network,
    load_checkpoint_network,
    replace_head_with_linear,
)
from opal_deploy.bench.options import ThroughputOptions
from opal_deploy.bench.targets import Setup, load_file, load_network
from opal_deploy.errors import ArtifactError, OpalError, UsageError
from opal_deploy.model.config import LINEAR_BASELINE, PLAIN_CLASSIFIER, HeadConfig
from opal_deploy.runtime.cuda_options import CudaOptions
from opal_deploy.runtime.devices import Driver
from opal_deploy.runtime.session import StagedSession, pinned
from opal_deploy.synthetic import example_images

CPU = Setup(device="cpu", threads=1)
EAGER = replace(CPU, runtime="eager")


@pytest.fixture(scope="module")
def network(exact_model):
    return load_checkpoint_network(exact_model.with_suffix(".pt"))


@pytest.fixture(scope="module")
def eager(network):
    return load_network(network, EAGER)


@pytest.fixture(scope="module")
def images():
    return example_images(3, 96, 96)


@pytest.mark.parametrize(
    ("setup", "tolerance"),
    [(EAGER, 1e-4), (replace(EAGER, channels_last=True), 1e-4), (CPU, 1e-5)],
    ids=["PyTorch", "channels last", "ONNX Runtime"],
)
def test_a_network_is_that_of_the_exported_file(network, exact_session, images, setup, tolerance):
    loaded = load_network(network, setup)
    outputs, expected = loaded.session.run(images), exact_session.run(images)
    np.testing.assert_allclose(outputs.logits, expected.logits, atol=tolerance)
    np.testing.assert_allclose(outputs.scores, expected.scores, atol=tolerance)
    assert outputs.argmax.dtype == np.int32
    assert (outputs.argmax == expected.argmax).mean() > 0.97
    assert loaded.metadata.unverified == ("made to be timed" if setup is CPU else "")
    assert loaded.metadata.outputs == ("logits", "argmax", "scores")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_rounds_the_backbone_and_leaves_the_head(network, eager, images, precision):
    session = load_network(network, replace(EAGER, precision=precision)).session
    outputs = session.run(images)
    assert outputs.logits.dtype == np.float32
    assert 0 < np.abs(outputs.logits - eager.session.run(images).logits).max() < 0.1
    projection = session._run.network.head.projection
    assert projection.weight.dtype == (torch.float16 if precision == "fp16" else torch.float32)
    assert all(p.dtype == torch.float32 for p in network.checkpoint.network.parameters())


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_file_in_another_precision_is_made_and_runs(network, images, precision):
    loaded = load_network(network, replace(CPU, precision=precision))
    assert loaded.target.precision == loaded.metadata.precision == precision
    assert len(loaded.session.run(images)) == 3


def test_a_target_is_described(eager, exact_model):
    assert eager.target == Target(
        "exact.pt", "shufflenet_v2_x0_5", "opal", "torch eager", torch.__version__, "cpu", "fp32",
        "uint8 NHWC; convolutions NCHW", (96, 96), 4, 3, compute_sha256(exact_model.with_suffix(".pt")),
    )  # fmt: skip
    file = load_file(exact_model, CPU)
    assert (file.target.sha256, file.target.runtime) == (compute_sha256(exact_model), "onnxruntime")
    assert file.threads == 1
    compiled = load_network(load_checkpoint_network(exact_model.with_suffix(".pt")), replace(CPU, runtime="compile"))
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


@pytest.mark.parametrize(
    ("keep_layers", "strides"), [(False, ["stride 32", "stride 16"]), (True, ["stride 32", "stride 16, all layers"])]
)
def test_each_stride_of_a_backbone_is_a_network_of_its_own(keep_layers, strides):
    options = ThroughputOptions(
        backbone=("shufflenet_v2_x0_5",), size=(64, 64), classes=3, stride=(32, 16), keep_layers=keep_layers
    )
    names = [f"shufflenet_v2_x0_5, {stride} + opal" for stride in strides]
    assert [network.name for network in build_networks(options)] == names


def test_the_linear_head_has_the_same_backbone(network):
    linear = replace_head_with_linear(network)
    assert head_name(linear.config.head.to_dict()) == "linear"
    for name, value in network.checkpoint.network.backbone.state_dict().items():
        assert torch.equal(linear.checkpoint.network.backbone.state_dict()[name], value)
    assert load_network(linear, EAGER).metadata.outputs == ("logits",)


def test_heads_have_names():
    heads = HeadConfig(), HeadConfig(distance="l1"), LINEAR_BASELINE, HeadConfig(pooling="avg"), HeadConfig(cws=False)
    names = ["opal", "opal l1", "linear", "projection+cws+anchors+avg", "projection+anchors+max"]
    assert [head_name(head.to_dict()) for head in heads] == names
    assert head_name(PLAIN_CLASSIFIER.to_dict()) == PLAIN_CLASSIFIER.kind == "plain"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_stages_of_a_batch_are_timed(exact_model, images, device):
    loaded = load_file(exact_model, Setup("onnxruntime", device, threads=1 if device == "cpu" else None))
    assert isinstance(loaded.session, StagedSession)
    with pinned(loaded.session, images):
        outputs, stages = loaded.session.run_staged(images)
    expected = loaded.session.run(images).logits
    np.testing.assert_allclose(outputs.logits, expected, atol=0 if device == "cpu" else 1e-4)
    assert (stages.compute or 0) > 0
    if device == "cpu":
        assert (stages.host_to_device, stages.device_to_host) == (None, None)
    else:
        assert min(stages.host_to_device or 0, stages.device_to_host or 0) > 0
        assert loaded.target.device.startswith("cuda:0 ")


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (Setup("onnxruntime", "cpu", precision="tf32"), "ONNX files have no precision tf32"),
        (Setup("onnxruntime", "cpu", precision="bf16"), "ONNX Runtime has no bfloat16 convolutions here"),
        (Setup("eager", "cpu", precision="tf32"), "CPUs have no precision tf32"),
        (Setup("eager", "cpu", precision="int8"), "PyTorch has no precision int8"),
        (Setup("onnxruntime", "cpu", channels_last=True), "--channels-last applies only to eager"),
        (
            Setup("onnxruntime", "cpu", cuda_options=CudaOptions(prefer_nhwc=True)),
            "--ort-option applies only to ONNX Runtime",
        ),
        (Setup("eager", "cpu", cuda_graphs=True), "--cuda-graphs applies only to engines"),
        (Setup("compile", "cpu", cuda_graphs=True), "--cuda-graphs applies only to engines, and to compile on a GPU"),
        (Setup("eager", "tpu"), "expected auto, cpu, cuda"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setup_that_does_not_fit_is_refused_in_one_line(network, setup, message):
    with pytest.raises(UsageError, match=message) as error:
        load_network(network, setup)
    assert "\n" not in str(error.value)
    assert "/tmp" not in str(error.value)


def test_other_files_precisions_and_machines_are_refused(network, exact_model, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="its precision is fp32, --precision asks for fp16"):
        load_file(exact_model, replace(CPU, precision="fp16"))
    with pytest.raises(ArtifactError, match=r"missing\.onnx: no such model"):
        load_file(tmp_path / "missing.onnx", CPU)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ArtifactError, match=r"a\.txt: not a model; expected"):
        load_file(tmp_path / "a.txt", CPU)
    monkeypatch.setattr(networks, "visible_driver", lambda: Driver(problem="no driver"))
    with pytest.raises(OpalError, match="tensorrt: no GPU here"):
        load_network(network, Setup("tensorrt"))
