"""TensorRT for RTX itself: it parses and builds what we export, on a machine without a GPU."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from onnx import TensorProto, helper

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.builder import EngineTarget, Network
from opal_deploy.export.checkpoint_source import ExportGraph, trace
from opal_deploy.export.options import EngineOptions
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version, load

pytestmark = pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")

PRECISIONS = {"fp32": lambda model: model, "fp16": to_fp16, "bf16": to_bf16}
EVERY_RUN = {"resnet50": ("fp32", "fp16"), "convnext_tiny": ("fp16", "bf16"), "efficientnet_v2_s": ("fp16",)}
OTHERS = ("resnet101", "resnet152", "convnext_small", "convnext_base", "efficientnet_v2_m", "efficientnet_v2_l")
BUILDS = [
    *(pytest.param(name, ("sm80",), built, id=name) for name, built in EVERY_RUN.items()),
    *(
        pytest.param(name, ("sm80", "sm89"), tuple(PRECISIONS), id=f"{name} in all", marks=pytest.mark.slow)
        for name in (*EVERY_RUN, *OTHERS)
    ),
]


@pytest.fixture(scope="module")
def library():
    return load(TENSORRT_RTX, "a test")


def target(sm):
    return EngineTarget(TENSORRT_RTX, sm, None, "a test")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backbone", "sms", "built"), BUILDS)
def test_the_papers_backbones_parse_in_every_precision_and_build(library, backbone, sms, built):
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig(backbone, 10, (224, 224))).eval()
    traced = trace(ExportGraph(network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    for precision, convert in PRECISIONS.items():
        model = convert(traced)
        parsed = Network(library, model.SerializeToString(), backbone)
        profile = parsed.profile(BatchRange(1, 64, 256))
        assert [tuple(shape) for shape in profile.get_shape("images")] == [(n, 224, 224, 3) for n in (1, 64, 256)]
        weights = sum(len(tensor.raw_data) or 4 * len(tensor.float_data) for tensor in model.graph.initializer)
        for sm in sms if precision in built else ():
            plan = parsed.build(target(sm), EngineOptions())
            # the weights are in it, in the precision of the graph
            assert 0.95 * weights < len(plan.content) < 1.5 * weights + 2**20
            assert plan.seconds > 0


def model_of(elem_type, in_shape, out_shape, *nodes):
    value = helper.make_tensor_value_info("images", elem_type, in_shape)
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, out_shape)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("elsewhere", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [value], [out]), opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


def test_a_graph_that_the_parser_refuses_is_one_line_with_the_node(library):
    node = helper.make_node("NoSuchOperation", ["images"], ["logits"], name="the_culprit", domain="elsewhere")
    with pytest.raises(ArtifactError, match=r"m\.onnx: TensorRT for RTX .*the_culprit \(NoSuchOperation\)") as refusal:
        Network(library, model_of(TensorProto.FLOAT, ["N", 3], ["N", 3], node), "m.onnx")
    assert "\n" not in str(refusal.value)


def test_uint8_that_is_transposed_before_it_is_cast_is_refused(library):
    # why the contract says that the cast comes first; when this fails, the contract may be loosened
    transpose = helper.make_node("Transpose", ["images"], ["moved"], perm=[0, 3, 1, 2])
    cast = helper.make_node("Cast", ["moved"], ["logits"], to=TensorProto.FLOAT)
    content = model_of(TensorProto.UINT8, ["N", 8, 8, 3], ["N", 3, 8, 8], transpose, cast)
    with pytest.raises((ArtifactError, UsageError)):
        Network(library, content, "m.onnx").build(target("sm80"), EngineOptions())


@pytest.fixture(scope="module")
def small(library, fp32):
    return Network(library, fp32.read_bytes(), "small.onnx")


def test_progress_and_messages_are_passed_on(library, fp32):
    messages = []
    progress = []
    network = Network(library, fp32.read_bytes(), "m.onnx", lambda *message: messages.append(message))
    network.build(target("sm80"), EngineOptions(), lambda *step: progress.append(step))
    assert any("Engine generation completed" in message for _, message in messages)
    assert {level for level, _ in messages} <= {"INFO", "WARNING", "ERROR"}
    assert len({phase for phase, _, _ in progress}) > 1
    assert all(0 <= done <= total for _, done, total in progress if total)
    assert any(done == total > 1 for _, done, total in progress)


def test_ctrl_c_ends_the_build_and_its_handler_is_put_back(small):
    def press(*_):
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        small.build(target("sm80"), EngineOptions(), press)
    assert signal.getsignal(signal.SIGINT) is before
    # the network can still be built afterwards
    assert small.build(target("sm80"), EngineOptions()).content


def test_too_little_workspace_says_so_and_what_to_give(small):
    with pytest.raises(UsageError, match=r"could not build the engine for sm80: .*give more --workspace"):
        small.build(target("sm80"), EngineOptions(workspace="1M"))


class TestOptionsOfTensorRT:
    """With TensorRT for RTX's own configuration, which has all of TensorRT's names; TensorRT needs a GPU."""

    @pytest.fixture
    def configure(self, library, fp32):
        network = Network(library, fp32.read_bytes(), "m.onnx")
        network.library = replace(library, name="tensorrt")

        return lambda **options: network._configure(
            EngineTarget("tensorrt", "sm89", None, "a test"), EngineOptions(**options)
        )

    @pytest.mark.parametrize(
        ("options", "flags"),
        [
            ({}, set()),
            ({"version_compatible": True}, {"VERSION_COMPATIBLE"}),
            ({"strip_weights": True}, {"STRIP_PLAN", "REFIT_IDENTICAL"}),
        ],
    )
    def test_flags(self, configure, small, options, flags):
        trt = small.library.module.BuilderFlag
        assert small._builder.create_builder_config().get_flag(trt.TF32), "else it need not be turned off"
        names, config = ("VERSION_COMPATIBLE", "STRIP_PLAN", "REFIT_IDENTICAL", "TF32"), configure(**options)
        assert {name for name in names if config.get_flag(getattr(trt, name))} == flags

    def test_levels_and_limits(self, configure, small):
        trt = small.library.module
        config = configure(optimization_level=5, workspace=1 << 30)
        assert config.builder_optimization_level == 5
        assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 30
        # TensorRT for RTX has the property, but keeps its default
        configure(hardware_compatible="ampere+")
        assert {"AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"} <= set(trt.HardwareCompatibilityLevel.__members__)

    def test_a_timing_cache_is_written_and_read_again(self, small, tmp_path):
        cache = tmp_path / "sub" / "timing.cache"
        for _ in range(2):
            small.build(target("sm80"), EngineOptions(timing_cache=cache))
            assert cache.stat().st_size > 0
