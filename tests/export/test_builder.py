"""TensorRT for RTX itself: it parses and builds what we export, on a machine without a GPU."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from onnx import TensorProto, helper

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.errors import ArtifactError
from opal_deploy.export.builder import Network
from opal_deploy.export.checkpoint_source import ExportGraph, trace
from opal_deploy.export.options import EngineOptions
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from tests.export.conftest import SM80, needs_rtx

pytestmark = needs_rtx

PRECISIONS = {"fp32": lambda model: model, "fp16": to_fp16, "bf16": to_bf16}
# what is built in every run; the other precisions are parsed
EVERY_RUN = {"convnext_tiny": ("bf16",)}
BUILDS = [
    *(pytest.param(name, ("sm80",), built, id=name) for name, built in EVERY_RUN.items()),
    *(
        pytest.param(name, ("sm80", "sm89"), tuple(PRECISIONS), id=f"{name} in all", marks=pytest.mark.slow)
        for name in (*EVERY_RUN, "resnet50", "efficientnet_v2_s", "resnet152", "convnext_base", "efficientnet_v2_l")
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backbone", "sms", "built"), BUILDS)
def test_the_papers_backbones_parse_in_every_precision_and_build(rtx, backbone, sms, built):
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig(backbone, 10, (224, 224))).eval()
    traced = trace(ExportGraph(network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    for precision, convert in PRECISIONS.items():
        model = convert(traced)
        parsed = Network(rtx, model.SerializeToString(), backbone)
        profile = parsed.profile(BatchRange(1, 64, 256))
        assert [tuple(shape) for shape in profile.get_shape("images")] == [(n, 224, 224, 3) for n in (1, 64, 256)]
        weights = sum(len(tensor.raw_data) or 4 * len(tensor.float_data) for tensor in model.graph.initializer)
        for sm in sms if precision in built else ():
            plan = parsed.build(replace(SM80, sm=sm), EngineOptions())
            # the weights are in it, in the precision of the graph
            assert 0.95 * weights < len(plan) < 1.5 * weights + 2**20


def model_of(elem_type, in_shape, out_shape, *nodes):
    value = helper.make_tensor_value_info("images", elem_type, in_shape)
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, out_shape)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("elsewhere", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [value], [out]), opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


def test_a_graph_that_the_parser_refuses_is_one_line_with_the_node(rtx):
    node = helper.make_node("NoSuchOperation", ["images"], ["logits"], name="the_culprit", domain="elsewhere")
    with pytest.raises(ArtifactError, match=r"m\.onnx: TensorRT for RTX .*the_culprit \(NoSuchOperation\)") as refusal:
        Network(rtx, model_of(TensorProto.FLOAT, ["N", 3], ["N", 3], node), "m.onnx")
    assert "\n" not in str(refusal.value)


@pytest.fixture(scope="module")
def small(rtx, fp32):
    return Network(rtx, fp32.read_bytes(), "small.onnx")


def test_ctrl_c_ends_the_build_and_its_handler_is_put_back(small):
    def press(*_):
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        small.build(SM80, EngineOptions(), press)
    assert signal.getsignal(signal.SIGINT) is before
    # the network can still be built afterwards
    assert small.build(SM80, EngineOptions())


def test_tf32_is_off(small):
    flag = small.library.module.BuilderFlag.TF32
    assert small._builder.create_builder_config().get_flag(flag), "else it need not be turned off"
    assert not small._configure(SM80, EngineOptions()).get_flag(flag)


def test_an_engine_for_the_lean_runtime_holds_no_copy_of_it(small):
    flags = small.library.module.BuilderFlag
    for lean in (False, True):
        config = small._configure(SM80, EngineOptions(lean=lean))
        assert {config.get_flag(flags.VERSION_COMPATIBLE), config.get_flag(flags.EXCLUDE_LEAN_RUNTIME)} == {lean}
