"""TensorRT for RTX itself: it parses and builds what we export, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD, Metadata
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.graph import ExportGraph, trace
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.export.quantization import to_int8
from opal_deploy.export.tensorrt.builder import Network, TensorInfo
from opal_deploy.export.tensorrt.options import BuildOptions, Choice
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.model.config import DISTANCES, HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, Bindings, installed_version, load
from opal_deploy.synthetic import example_images

pytestmark = pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")

EVERY_RUN = ("resnet50", "convnext_tiny", "efficientnet_v2_s")
OTHERS = ("resnet101", "resnet152", "convnext_small", "convnext_base", "efficientnet_v2_m", "efficientnet_v2_l")
BACKBONES = [*EVERY_RUN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
PRECISIONS = {"fp32": lambda model: model, "fp16": to_fp16, "bf16": to_bf16}


@pytest.fixture(scope="module")
def library() -> Bindings:
    return load(TENSORRT_RTX, "a test")


@pytest.fixture(scope="module")
def traced() -> Callable[[str], onnx.ModelProto]:
    """A backbone with random weights and ten classes, traced once."""
    latest: dict[str, onnx.ModelProto] = {}

    def get(name: str) -> onnx.ModelProto:
        if name not in latest:
            latest.clear()
            torch.manual_seed(0)
            network = OpalNetwork(NetworkConfig(name, 10, (224, 224))).eval()
            latest[name] = trace(ExportGraph(network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
        return latest[name]

    return get


def choice(target: str) -> Choice:
    return Choice(TENSORRT_RTX, target, None, "a test")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_papers_backbones_parse_and_build(
    library: Bindings, traced: Callable[[str], onnx.ModelProto], backbone: str, precision: str
) -> None:
    network = Network(library, PRECISIONS[precision](traced(backbone)).SerializeToString(), backbone)
    assert network.inputs == [TensorInfo("images", "UINT8", (-1, 224, 224, 3))]
    assert network.outputs == [
        TensorInfo("logits", "FLOAT", (-1, 10)),
        TensorInfo("argmax", "INT32", (-1, 50)),
        TensorInfo("scores", "FLOAT", (-1, 50)),
    ]
    profile = network.profile(BatchRange(1, 64, 256))
    assert [tuple(shape) for shape in profile.get_shape("images")] == [(n, 224, 224, 3) for n in (1, 64, 256)]
    weights = sum(tensor_bytes(tensor) for tensor in PRECISIONS[precision](traced(backbone)).graph.initializer)
    for target in ("sm80", "sm89"):
        plan = network.build(choice(target), BuildOptions())
        # the weights are in it, in the precision of the graph
        assert 0.95 * weights < len(plan.content) < 1.5 * weights + 2**20
        assert plan.seconds > 0


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    return len(tensor.raw_data) or 4 * len(tensor.float_data)


ROWS = [
    *(HeadConfig(distance=distance) for distance in DISTANCES),
    *(HeadConfig(cws=cws, pooling=pooling) for cws, pooling in product((True, False), ("max", "avg"))),
    *(
        HeadConfig(projection=projection, pooling=pooling, cws=cws, anchors=False)
        for projection, pooling, cws in product((True, False), ("max", "avg"), (True, False))
        if (projection, pooling, cws) != (True, "max", True)
    ),
]


def _cases() -> list[Any]:
    """Every row once; of those without anchors, which have no head worth the name, one in every run."""
    plain = [row for row in ROWS if not row.anchors][1:]
    rows = [pytest.param(row, "uint8", marks=pytest.mark.slow if row in plain else ()) for row in ROWS]
    return [*rows, pytest.param(HeadConfig(), "float32")]


@pytest.mark.parametrize(("head", "kind"), _cases(), ids=str)
def test_no_head_has_an_operator_that_the_parser_refuses(
    library: Bindings, make_checkpoint: Any, head: HeadConfig, kind: Any
) -> None:
    checkpoint: Checkpoint = make_checkpoint(head=head)
    graph = ExportGraph(checkpoint.network, kind, IMAGENET_MEAN, IMAGENET_STD, attention=head.evidence != "none")
    network = Network(library, trace(graph).SerializeToString(), "a head")
    assert tuple(output.name for output in network.outputs) == graph.output_names


def test_int8_parses_and_builds_smaller(library: Bindings, make_checkpoint: Any) -> None:
    checkpoint: Checkpoint = make_checkpoint("resnet18", size=(64, 64))
    metadata: Metadata = build_metadata(checkpoint)
    model = trace(ExportGraph(checkpoint.network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    quantised = to_int8(model, example_images(16, 64, 64), metadata)
    sizes = {}
    for name, graph in {"fp32": model, "int8": quantised}.items():
        plan = Network(library, graph.SerializeToString(), name).build(choice("sm80"), BuildOptions())
        sizes[name] = len(plan.content)
    assert sizes["int8"] < 0.45 * sizes["fp32"]


def test_a_graph_that_the_parser_refuses_is_one_line_with_the_node(library: Bindings) -> None:
    value = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3])
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])
    node = helper.make_node("NoSuchOperation", ["images"], ["logits"], name="the_culprit", domain="elsewhere")
    graph = helper.make_graph([node], "g", [value], [out])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("elsewhere", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with pytest.raises(ArtifactError, match=r"m\.onnx: TensorRT for RTX .*the_culprit \(NoSuchOperation\)") as refusal:
        Network(library, model.SerializeToString(), "m.onnx")
    assert "\n" not in str(refusal.value)


def test_uint8_that_is_transposed_before_it_is_cast_is_refused(library: Bindings) -> None:
    # why the contract says that the cast comes first; when this fails, the contract may be loosened
    value = helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 8, 8, 3])
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3, 8, 8])
    nodes = [
        helper.make_node("Transpose", ["images"], ["moved"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["moved"], ["logits"], to=TensorProto.FLOAT),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [value], [out]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    with pytest.raises((ArtifactError, UsageError)):
        Network(library, model.SerializeToString(), "m.onnx").build(choice("sm80"), BuildOptions())


@pytest.fixture(scope="module")
def small(library: Bindings, make_checkpoint: Any) -> Network:
    checkpoint: Checkpoint = make_checkpoint()
    model = trace(ExportGraph(checkpoint.network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    return Network(library, model.SerializeToString(), "small.onnx")


def test_progress_is_told_phase_by_phase(small: Network) -> None:
    told: list[tuple[str, int, int]] = []
    small.build(choice("sm80"), BuildOptions(), lambda *step: told.append(step))
    phases = {phase for phase, _, _ in told}
    assert len(phases) > 1
    assert all(0 <= done <= total for _, done, total in told if total)
    assert any(done == total > 1 for _, done, total in told)


def test_ctrl_c_ends_the_build(small: Network) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small.build(choice("sm80"), BuildOptions(), interrupt)
    # the network can still be built afterwards
    assert small.build(choice("sm80"), BuildOptions()).content


def test_too_little_workspace_says_so_and_what_to_give(small: Network) -> None:
    with pytest.raises(UsageError, match=r"could not build the engine for sm80: .*give more --workspace"):
        small.build(choice("sm80"), BuildOptions(workspace=1024))


def test_what_the_builder_says_is_passed_on(library: Bindings, make_checkpoint: Any) -> None:
    heard: list[tuple[str, str]] = []
    checkpoint: Checkpoint = make_checkpoint()
    model = trace(ExportGraph(checkpoint.network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    network = Network(library, model.SerializeToString(), "m.onnx", lambda *line: heard.append(line))
    network.build(choice("sm80"), BuildOptions())
    assert any("Engine generation completed" in message for _, message in heard)
    assert {level for level, _ in heard} <= {"INFO", "WARNING", "ERROR"}


def test_tf32_is_off(small: Network) -> None:
    config = small._builder.create_builder_config()
    flag = small.library.module.BuilderFlag.TF32
    assert config.get_flag(flag), "when it is off by itself, turning it off is no longer needed"
    small._configure(config, choice("sm80"), BuildOptions())
    assert not config.get_flag(flag)


class TestOptionsOfTensorRTProper:
    """TensorRT itself is not installable where these tests run; its names are those of TensorRT for RTX."""

    class Config:
        """Notes what it is told."""

        def __init__(self) -> None:
            self.flags: set[str] = {"TF32"}
            self.told: dict[str, Any] = {}

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in ("flags", "told"):
                self.told[name] = value
            object.__setattr__(self, name, value)

        def set_flag(self, flag: Any) -> None:
            self.flags.add(flag.name)

        def clear_flag(self, flag: Any) -> None:
            self.flags.discard(flag.name)

        def add_optimization_profile(self, profile: Any) -> None: ...

        def set_memory_pool_limit(self, pool: Any, size: int) -> None:
            self.told[pool.name] = size

    def configured(self, small: Network, **options: Any) -> Any:
        config = self.Config()
        proper = small.library
        small.library = replace(proper, name="tensorrt")
        try:
            small._configure(config, Choice("tensorrt", "sm89", None, "a test"), BuildOptions(**options))
        finally:
            small.library = proper
        return config

    def test_nothing_is_told_that_was_not_asked_for(self, small: Network) -> None:
        config = self.configured(small)
        assert config.flags == set()
        assert config.told == {}

    @pytest.mark.parametrize(
        ("options", "flags"),
        [
            ({"version_compatible": True}, {"VERSION_COMPATIBLE"}),
            ({"strip_weights": True}, {"STRIP_PLAN", "REFIT_IDENTICAL"}),
            ({"refit": True}, {"REFIT"}),
            ({"strip_weights": True, "refit": True}, {"STRIP_PLAN", "REFIT"}),
        ],
    )
    def test_flags(self, small: Network, options: dict[str, bool], flags: set[str]) -> None:
        assert self.configured(small, **options).flags == flags

    def test_levels_and_limits(self, small: Network) -> None:
        told = self.configured(small, optimization_level=5, workspace=1 << 30, hardware_compatible="ampere+").told
        assert (told["builder_optimization_level"], told["WORKSPACE"]) == (5, 1 << 30)
        assert told["hardware_compatibility_level"].name == "AMPERE_PLUS"
        same = self.configured(small, hardware_compatible="same").told
        assert same["hardware_compatibility_level"].name == "SAME_COMPUTE_CAPABILITY"

    def test_a_timing_cache_is_written_and_read_again(self, small: Network, tmp_path: Path) -> None:
        # with TensorRT for RTX, which only goes through the motions: `check_for` refuses it there
        cache = tmp_path / "sub" / "timing.cache"
        for _ in range(2):
            small.build(choice("sm80"), BuildOptions(timing_cache=cache))
            assert cache.stat().st_size > 0
