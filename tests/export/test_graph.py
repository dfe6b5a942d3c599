"""The contract of every exported graph (docs/contract.md), on real exports of a tiny network and of a small ResNet."""

import getpass
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn
from torchvision.ops import SqueezeExcitation

from opal_deploy.errors import UsageError
from opal_deploy.export.builder import Network
from opal_deploy.export.checkpoint_source import ExportGraph, trace
from opal_deploy.model.config import DISTANCES, HeadConfig
from opal_deploy.model.head import OpalHead
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.openvino_session import OpenvinoSession
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.synthetic import example_images
from tests.builders import build_checkpoint


@pytest.fixture(scope="module")
def exported(resnet, write_onnx, tmp_path_factory):
    return write_onnx(resnet, tmp_path_factory.mktemp("resnet") / "c.onnx")


@pytest.fixture(scope="module")
def graph(exported):
    return onnx.load(exported.path)


class TestResNet:
    def test_inputs_and_outputs_are_the_contracts_and_the_cast_comes_first(self, graph):
        (images,) = graph.graph.input
        dims = images.type.tensor_type.shape.dim
        assert (images.name, images.type.tensor_type.elem_type) == ("images", TensorProto.UINT8)
        assert [d.dim_value for d in dims[1:]] == [64, 96, 3]
        assert dims[0].dim_param
        # TensorRT refuses any other first operation on uint8
        assert [node.op_type for node in graph.graph.node[:2]] == ["Cast", "Transpose"]
        assert [node.op_type for node in graph.graph.node if "images" in node.input] == ["Cast"]
        outputs = [(value.name, value.type.tensor_type.elem_type) for value in graph.graph.output]
        assert outputs == [
            ("logits", TensorProto.FLOAT), ("argmax", TensorProto.INT32), ("scores", TensorProto.FLOAT),
        ]  # fmt: skip

    def test_it_is_one_valid_file_of_versions_and_operators_that_runtimes_take(self, exported, graph):
        onnx.checker.check_model(graph, full_check=True)
        assert graph.ir_version == 8
        assert [(o.domain, o.version) for o in graph.opset_import] == [("", 17)]
        assert not [t.name for t in graph.graph.initializer if t.data_location == TensorProto.EXTERNAL]
        assert [path.name for path in exported.path.parent.iterdir()] == ["c.onnx"]
        names = [node.op_type for node in graph.graph.node]
        tail = names[names.index("Softmax") :]
        assert not {"MaxPool", "Gemm", "CDist", "Einsum", "ReduceL2", "ReduceSum"} & set(tail)
        # the norm and the sums over slots; the anchors are no matrix
        assert tail.count("MatMul") == 2

    def test_nothing_of_the_exporting_machine_is_inside(self, exported, graph):
        # weights may spell anything
        named = onnx.ModelProto()
        named.CopyFrom(graph)
        for tensor in named.graph.initializer:
            tensor.raw_data = b""
        content = named.SerializeToString().decode("latin-1")
        here = (Path(__file__).parents[2], Path.home(), exported.path.parent, Path(torch.__file__).parent)
        traces = [*map(str, here), "site-packages", ".py", f"/{getpass.getuser()}/"]
        assert not [text for text in traces if text in content]
        assert not [node.name for node in graph.graph.node if node.doc_string or node.metadata_props]


# every head of the paper's ablation: distances, then pooling and softmax, then those without anchors
ANCHORED = [
    *(HeadConfig(distance=distance) for distance in DISTANCES),
    *(HeadConfig(cws=cws, pooling=pooling) for cws, pooling in [(True, "avg"), (False, "max"), (False, "avg")]),
    *(HeadConfig(distance=distance, prototypes_per_class=1) for distance in ("l2", "linf", "tropical")),
]
WITHOUT_ANCHORS = [
    HeadConfig(projection=projection, pooling=pooling, cws=cws, anchors=False)
    for projection, pooling, cws in product((True, False), ("max", "avg"), (True, False))
    if (projection, pooling, cws) != (True, "max", True)
]


def _id(head):
    parts = [head.distance, head.pooling, f"m{head.prototypes_per_class}"]
    flags = {"no cws": not head.cws, "no projection": not head.projection, "no anchors": not head.anchors}
    return " ".join([*parts, *(name for name, on in flags.items() if on)])


def _added_epsilons(model):
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    added = [constants.get(name) for node in model.graph.node if node.op_type == "Add" for name in node.input]
    return sum(value is not None and value.size == 1 and 0 < value.item() < 1e-7 for value in added)


# each of their settings is in one of the others
SLOW = [ANCHORED[len(DISTANCES) + 2], *WITHOUT_ANCHORS[1:-1]]


@pytest.mark.parametrize(
    "head",
    [pytest.param(head, marks=[pytest.mark.slow] * (head in SLOW)) for head in (*ANCHORED, *WITHOUT_ANCHORS)],
    ids=_id,
)
def test_every_head_exports_reproduces_pytorch_and_parses_in_tensorrt(write_onnx, rtx, tmp_path, head):
    single = head.prototypes_per_class == 1
    checkpoint = build_checkpoint(head=head, **({"num_classes": 2, "seed": 1} if single else {}))
    done = write_onnx(checkpoint, tmp_path / "c.onnx")
    names = ("logits", "argmax", "scores") if head.anchors else ("logits",)
    assert (done.metadata.outputs, done.metadata.distance) == (names, head.distance)
    assert done.metadata.evidence == ("none" if not head.anchors else "exact" if head.pooling == "max" else "map")
    model = onnx.load(done.path)
    assert tuple(value.name for value in model.graph.output) == names
    if head.anchors:
        # ONNX optimisers take a scalar of 1e-8 for zero, and x + 0 for x
        assert _added_epsilons(model) == (2 if head.distance == "kl" else 1)
    _assert_reproduces_torch(done, checkpoint)
    if rtx is not None:
        Network(rtx, done.path.read_bytes(), "c.onnx")


def _assert_reproduces_torch(done, checkpoint):
    """By ONNX Runtime, OpenVINO and PyTorch, outside the exporter's own comparison; logits relative to their size."""
    # more images than classes: OpenVINO reads some constants by the batch's index
    images = checkpoint.network.config.num_classes + 5
    pixels = example_images(images, *checkpoint.network.config.input_size)
    expected = TorchSession(checkpoint, device="cpu").run(pixels)
    session = OnnxSession(done.path, device="cpu", threads=2)
    for outputs in (session.run(pixels), OpenvinoSession(done.path, threads=2).run(pixels)):
        # where the two differ by rounding alone, the root of l2 and l3 may magnify it near an anchor
        np.testing.assert_allclose(outputs.logits, expected.logits, rtol=2e-5, atol=2e-5)
        if expected.scores is not None:
            np.testing.assert_allclose(outputs.scores, expected.scores, rtol=1e-4, atol=1e-6)
            assert (outputs.argmax == expected.argmax).mean() > 0.99


@pytest.mark.parametrize("cws", [True, False])
def test_attention_is_output_on_request(write_onnx, rtx, tmp_path, cws):
    # without the softmax, attention and projection are one tensor under two names
    done = write_onnx(build_checkpoint(head=HeadConfig(cws=cws)), tmp_path / "c.onnx", outputs="attention")
    outputs = OnnxSession(done.path, device="cpu", threads=2).run(example_images(2, 64, 96))
    assert outputs.attention is not None
    assert outputs.attention.shape == (2, 20, 2, 3)
    np.testing.assert_array_equal(outputs.attention.reshape(2, 20, 6).max(2), outputs.scores)
    if rtx is not None:
        Network(rtx, done.path.read_bytes(), "c.onnx")


def test_an_image_without_any_feature_gets_the_bias_and_not_nan(write_onnx, tmp_path):
    # all features zero: the norm is zero, and only its epsilon keeps 0 / 0 out of the graph
    checkpoint = build_checkpoint(head=HeadConfig(projection=False, cws=False, pooling="avg", anchors=False))
    with torch.no_grad():
        for parameter in checkpoint.network.backbone.parameters():
            parameter.zero_()
    done = write_onnx(checkpoint, tmp_path / "c.onnx")
    outputs = OnnxSession(done.path, device="cpu", threads=2).run(example_images(1, 64, 96))
    np.testing.assert_allclose(outputs.logits[0], checkpoint.network.head.classifier.bias.detach(), atol=1e-7)


def test_squeeze_and_excitation_needs_no_shape_of_the_batch(write_onnx, tmp_path):
    # ONNX Runtime computes such nodes on the CPU, in the midst of a GPU's kernels
    checkpoint = build_checkpoint()
    body = checkpoint.network.backbone.body
    body.second = nn.Sequential(body.second, SqueezeExcitation(24, 8))
    done = write_onnx(checkpoint, tmp_path / "c.onnx")
    names = {node.op_type for node in onnx.load(done.path).graph.node}
    assert "ReduceMean" in names
    assert not {"Shape", "Squeeze", "Range", "Gather"} & names
    _assert_reproduces_torch(done, checkpoint)
    assert isinstance(body.second[1].avgpool, nn.AdaptiveAvgPool2d)


def test_a_network_over_two_gigabytes_is_refused_before_it_is_traced():
    network = build_checkpoint(sharp=False).network
    with torch.device("meta"):
        network.head = OpalHead(2048, 60_000, network.config.head)
    with pytest.raises(UsageError, match=r"2\.5 GB"):
        trace(ExportGraph(network, "uint8", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "resnet50", "resnet152", "efficientnet_v2_s", "efficientnet_v2_l", "convnext_tiny", "convnext_base",
    ],
)  # fmt: skip
def test_a_random_checkpoint_of_a_backbone_passes_the_gate(write_onnx, tmp_path, name):
    done = write_onnx(build_checkpoint(name, size=(224, 224), sharp=False), tmp_path / "c.onnx")
    assert done.comparison
    # a gate that had to be widened says so
    gate = done.metadata.verification["gate"]
    assert ("float64" in done.metadata.verification) == (gate["cosine"] > 1e-6 or gate["score"] > 1e-5)
