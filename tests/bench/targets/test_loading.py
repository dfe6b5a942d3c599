"""What is timed is what it says it is, and in every runtime the same network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.bench.measurement import head_name
from opal_deploy.bench.targets.loading import Setup, load_file, load_network
from opal_deploy.bench.targets.networks import (
    NamedNetwork,
    build_random_network,
    load_checkpoint_network,
    replace_head_with_linear,
)
from opal_deploy.errors import ArtifactError, OpalError, UsageError
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.session import StagedSession
from opal_deploy.synthetic import example_images

CPU = Setup(device="cpu", threads=1)


@pytest.fixture(scope="module")
def network(exact_model: Path) -> NamedNetwork:
    return load_checkpoint_network(exact_model.with_suffix(".pt"))


@pytest.fixture(scope="module")
def images() -> Any:
    return example_images(3, 96, 96)


@pytest.mark.parametrize("channels_last", [False, True])
def test_pytorch_answers_as_the_exported_file(
    network: NamedNetwork, exact_model: Path, images: Any, channels_last: bool
) -> None:
    found = load_network(network, replace(CPU, runtime="eager", channels_last=channels_last)).session.run(images)
    expected = OnnxSession(exact_model, device="cpu", threads=1).run(images)

    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    assert found.argmax is not None
    assert found.argmax.dtype == np.int32
    assert (found.argmax == expected.argmax).mean() > 0.97


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_rounds_the_body_and_leaves_the_head(network: NamedNetwork, images: Any, precision: str) -> None:
    session = load_network(network, replace(CPU, runtime="eager", precision=precision)).session
    whole = load_network(network, replace(CPU, runtime="eager")).session.run(images)

    found = session.run(images)

    assert found.logits.dtype == np.float32
    assert 0 < np.abs(found.logits - whole.logits).max() < 0.1
    projection = session._run.graph.network.head.projection  # type: ignore[attr-defined]
    assert projection.weight.dtype == (torch.float16 if precision == "fp16" else torch.float32)
    assert all(p.dtype == torch.float32 for p in network.checkpoint.network.parameters())


def test_onnx_runtime_gets_the_same_network(network: NamedNetwork, exact_model: Path, images: Any) -> None:
    loaded = load_network(network, CPU)

    np.testing.assert_allclose(
        loaded.session.run(images).logits, OnnxSession(exact_model).run(images).logits, atol=1e-5
    )
    assert loaded.metadata.unverified == "made to be timed"
    assert loaded.metadata.outputs == ("logits", "argmax", "scores")


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_file_in_another_precision_is_made_and_runs(network: NamedNetwork, images: Any, precision: str) -> None:
    loaded = load_network(network, replace(CPU, precision=precision))

    assert loaded.target.precision == loaded.metadata.precision == precision
    assert len(loaded.session.run(images)) == 3


def test_the_record_says_what_it_is(network: NamedNetwork, exact_model: Path) -> None:
    target = load_network(network, replace(CPU, runtime="eager")).target

    assert (target.name, target.backbone, target.head) == ("exact.pt", "shufflenet_v2_x0_5", "opal")
    assert (target.runtime, target.runtime_version) == ("torch eager", torch.__version__)
    assert (target.device, target.precision, target.input_size) == ("cpu", "fp32", (96, 96))
    assert (target.num_classes, target.prototypes_per_class) == (4, 3)
    assert target.layout == "uint8 NHWC; convolutions NCHW"
    assert target.sha256 == compute_sha256(exact_model.with_suffix(".pt"))


def test_an_onnx_file_is_timed_as_it_is(exact_model: Path) -> None:
    loaded = load_file(exact_model, CPU)

    assert loaded.target.sha256 == compute_sha256(exact_model)
    assert loaded.target.runtime == "onnxruntime"
    assert loaded.threads == 1
    assert "to logits, argmax, scores in host memory" in loaded.timed


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    a, b = (build_random_network("shufflenet_v2_x0_5", num_classes=3, size=(64, 64)) for _ in range(2))

    assert torch.rand(1) == expected
    states = (n.checkpoint.network.state_dict().values() for n in (a, b))
    assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))
    assert (a.name, a.sha256) == ("shufflenet_v2_x0_5 + opal", None)


def test_the_linear_head_sits_on_the_same_backbone(network: NamedNetwork) -> None:
    linear = replace_head_with_linear(network)

    assert head_name(linear.config.head.to_dict()) == "linear"
    for name, value in network.checkpoint.network.backbone.state_dict().items():
        assert torch.equal(linear.checkpoint.network.backbone.state_dict()[name], value)
    assert load_network(linear, replace(CPU, runtime="eager")).metadata.outputs == ("logits",)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (HeadConfig(), "opal"),
        (HeadConfig(distance="l1"), "opal l1"),
        (LINEAR_BASELINE, "linear"),
        (HeadConfig(pooling="avg"), "projection+cws+anchors+avg"),
        (HeadConfig(cws=False), "projection+anchors+max"),
    ],
    ids=str,
)
def test_heads_have_names(head: HeadConfig, name: str) -> None:
    assert head_name(head.to_dict()) == name


@pytest.mark.parametrize("runtime", ["eager", "onnxruntime"])
def test_stages_of_a_cpu_are_all_computing(network: NamedNetwork, images: Any, runtime: Any) -> None:
    session = load_network(network, replace(CPU, runtime=runtime)).session
    assert isinstance(session, StagedSession)

    outputs, stages = session.run_staged(images)

    np.testing.assert_array_equal(outputs.logits, session.run(images).logits)
    assert stages.host_to_device is None
    assert stages.device_to_host is None
    assert stages.compute is not None
    assert stages.compute > 0


@pytest.mark.gpu
@pytest.mark.parametrize("runtime", ["eager", "onnxruntime"])
def test_stages_of_a_gpu_are_told_apart(network: NamedNetwork, images: Any, runtime: Any) -> None:
    loaded = load_network(network, Setup(runtime, "cuda"))
    session = loaded.session
    assert isinstance(session, StagedSession)

    outputs, stages = session.run_staged(images)

    np.testing.assert_allclose(outputs.logits, session.run(images).logits, atol=1e-4)
    assert min(stages.host_to_device or 0, stages.compute or 0, stages.device_to_host or 0) > 0
    assert loaded.target.device.startswith("cuda:0 ")


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (Setup("onnxruntime", "cpu", precision="tf32"), "precision tf32 in an ONNX file"),
        (Setup("onnxruntime", "cpu", precision="bf16"), "ONNX Runtime has no bfloat16 convolutions here"),
        (Setup("eager", "cpu", precision="tf32"), "CPUs have none"),
        (Setup("eager", "cpu", precision="int8"), "precision int8 in PyTorch"),
        (Setup("onnxruntime", "cpu", channels_last=True), "--channels-last is PyTorch's"),
        (Setup("eager", "tpu"), "expected auto, cpu, cuda"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_in_one_line(network: NamedNetwork, setup: Setup, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        load_network(network, setup)

    assert "\n" not in str(error.value)
    assert "/tmp" not in str(error.value)


def test_a_files_precision_is_its_own(exact_model: Path) -> None:
    with pytest.raises(UsageError, match="it is fp32, and --precision asks for fp16"):
        load_file(exact_model, replace(CPU, precision="fp16"))


@pytest.mark.parametrize("name", ["missing.onnx", "a.txt"])
def test_what_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    if name == "a.txt":
        (tmp_path / name).touch()
    with pytest.raises(ArtifactError, match="model"):
        load_file(tmp_path / name, CPU)


def test_an_engine_needs_a_gpu(network: NamedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    from opal_deploy.bench.targets import networks
    from opal_deploy.runtime.nvml import Driver

    monkeypatch.setattr(networks, "visible_driver", lambda: Driver(problem="no driver"))
    with pytest.raises(OpalError, match="tensorrt: no GPU here"):
        load_network(network, Setup("tensorrt"))
