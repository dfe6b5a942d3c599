"""What every exported graph is: inputs, outputs, formats, metadata. Real exports of a tiny network and of ResNet-18."""

from __future__ import annotations

import getpass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.export.candidate import ExportOptions
from opal_deploy.export.checkpoint_export import export_checkpoint
from opal_deploy.export.onnx_export import ExportedModel
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import DISTANCES, HeadConfig
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.synthetic import example_images

ANCHORED = [{"cws": cws, "pooling": pooling} for cws, pooling in product((True, False), ("max", "avg"))]
WITHOUT_ANCHORS: list[dict[str, Any]] = [
    {"projection": projection, "pooling": pooling, "cws": cws, "anchors": False}
    for projection, pooling, cws in product((True, False), ("max", "avg"), (True, False))
    if (projection, pooling, cws) != (True, "max", True)
]


def _export(checkpoint: Checkpoint, out: Path, **options: Any) -> ExportedModel:
    return export_checkpoint(checkpoint, out, ExportOptions(out=out, threads=2, **options))


@pytest.fixture(scope="module")
def exported(resnet18: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    return _export(resnet18, tmp_path_factory.mktemp("resnet18") / "c.onnx")


@pytest.fixture(scope="module")
def graph(exported: ExportedModel) -> onnx.ModelProto:
    return onnx.load(exported.path)


def _answers(path: Path, count: int, size: tuple[int, int]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"images": example_images(count, *size)}), strict=True))


class TestResNet18:
    def test_the_input_is_uint8_nhwc_with_dynamic_batch(self, graph: onnx.ModelProto) -> None:
        (images,) = graph.graph.input
        dims = images.type.tensor_type.shape.dim
        assert (images.name, images.type.tensor_type.elem_type) == ("images", TensorProto.UINT8)
        assert [d.dim_value for d in dims[1:]] == [64, 96, 3]
        assert dims[0].dim_param

    def test_the_first_operation_is_the_cast(self, graph: onnx.ModelProto) -> None:
        # TensorRT refuses any other first operation on uint8
        assert [node.op_type for node in graph.graph.node[:2]] == ["Cast", "Transpose"]
        assert [node.op_type for node in graph.graph.node if "images" in node.input] == ["Cast"]

    def test_outputs_have_the_contracts_names_order_and_types(self, graph: onnx.ModelProto) -> None:
        found = [(value.name, value.type.tensor_type.elem_type) for value in graph.graph.output]
        assert found == [
            ("logits", TensorProto.FLOAT), ("argmax", TensorProto.INT32), ("scores", TensorProto.FLOAT),
        ]  # fmt: skip

    @pytest.mark.parametrize("count", [1, 3, 16])
    def test_any_batch_size_runs(self, exported: ExportedModel, count: int) -> None:
        answers = _answers(exported.path, count, (64, 96))
        assert {name: value.shape for name, value in answers.items()} == {
            "logits": (count, 4), "argmax": (count, 20), "scores": (count, 20),
        }  # fmt: skip

    def test_onnxs_own_checker_accepts_it(self, graph: onnx.ModelProto) -> None:
        onnx.checker.check_model(graph, full_check=True)

    def test_format_versions_are_ones_that_runtimes_read(self, graph: onnx.ModelProto) -> None:
        assert graph.ir_version == 10
        assert [(o.domain, o.version) for o in graph.opset_import] == [("", 20)]

    def test_it_is_one_file_without_external_data(self, exported: ExportedModel, graph: onnx.ModelProto) -> None:
        assert not [t.name for t in graph.graph.initializer if t.data_location == TensorProto.EXTERNAL]
        assert [path.name for path in exported.path.parent.iterdir()] == ["c.onnx"]

    @pytest.mark.parametrize("operator", ["MaxPool", "Gemm", "MatMul", "CDist", "Einsum"])
    def test_the_head_has_no_operator_that_exports_badly(self, graph: onnx.ModelProto, operator: str) -> None:
        names = [node.op_type for node in graph.graph.node]
        head = names[names.index("Softmax") :]
        assert operator not in head

    def test_nothing_of_the_exporting_machine_is_inside(self, exported: ExportedModel, graph: onnx.ModelProto) -> None:
        # weights may spell anything
        named = onnx.ModelProto()
        named.CopyFrom(graph)
        for tensor in named.graph.initializer:
            tensor.raw_data = b""
        content = named.SerializeToString().decode("latin-1")
        here = (Path(__file__).parents[2], Path.home(), exported.path.parent, Path(torch.__file__).parent)
        traces = [*map(str, here), "site-packages", ".py", f"/{getpass.getuser()}/"]
        assert not [text for text in traces if text in content]

    def test_no_node_carries_a_stack_trace(self, graph: onnx.ModelProto) -> None:
        assert not [node.name for node in graph.graph.node if node.doc_string or node.metadata_props]

    def test_metadata_is_the_only_property(self, graph: onnx.ModelProto) -> None:
        assert [entry.key for entry in graph.metadata_props] == ["opal"]

    def test_metadata_describes_the_network(self, exported: ExportedModel) -> None:
        found = onnx_file.read_metadata(exported.path)
        assert found == exported.metadata
        assert (found.backbone, found.grid, found.input_size) == ("resnet18", (2, 3), (64, 96))
        assert (found.input_kind, found.precision, found.evidence) == ("uint8", "fp32", "exact")
        assert found.class_names == ("Sooty Albatross", "Crested Auklet", "Äußerer Käuz", "Tern <b>")
        assert found.source["sha256"] == f"{0:064x}"
        assert found.exporter["opset"] == 20

    def test_the_verification_report_says_what_was_compared(self, exported: ExportedModel) -> None:
        report = onnx_file.read_metadata(exported.path).verification
        assert report["passed"] is True
        assert report["batches"] == [1, 2, 7]
        assert (report["images"], report["pictures"]) == (64, "64 generated creatures")
        assert report["reference"].startswith(f"PyTorch {torch.__version__}")
        assert report["gate"]["cosine"] == 1e-6
        assert report["max_cosine"] <= 1e-6
        assert report["cells"] + report["cells_tied"] == 64 * 20
        assert report["cells_different"] == 0

    def test_the_digest_matches(self, exported: ExportedModel) -> None:
        onnx_file.check_digest(exported.path, onnx_file.read_metadata(exported.path))

    def test_the_test_vectors_are_pytorchs_answers(self, exported: ExportedModel, resnet18: Checkpoint) -> None:
        stored = test_vectors.unpack(exported.metadata.test_vectors, "c.onnx")
        answers = TorchSession(resnet18, device="cpu").run(stored.images)
        assert len(stored.images) == 4
        np.testing.assert_array_equal(stored.outputs.argmax, answers.argmax)
        np.testing.assert_allclose(stored.outputs.logits, answers.logits, rtol=1e-6)

    def test_normalisation_is_in_the_graph(self, exported: ExportedModel, resnet18: Checkpoint) -> None:
        shown = example_images(3, 64, 96)
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        images = ((torch.from_numpy(shown) / 255 - mean) / std).permute(0, 3, 1, 2)
        with torch.no_grad():
            expected = resnet18.network(images)
        np.testing.assert_allclose(_answers(exported.path, 3, (64, 96))["logits"], expected, atol=1e-5)


def _matches_torch(done: ExportedModel, checkpoint: Checkpoint) -> None:
    """By ONNX Runtime and PyTorch, outside the exporter's own comparison; logits relative to their size."""
    shown = example_images(9, *checkpoint.network.config.input_size)
    found: Outputs = OnnxSession(done.path, device="cpu", threads=2).run(shown)
    expected = TorchSession(checkpoint, device="cpu").run(shown)
    # where the two differ by rounding alone, the root of l2 and l3 may magnify it near an anchor
    np.testing.assert_allclose(found.logits, expected.logits, rtol=2e-5, atol=2e-5)
    if expected.scores is not None:
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
        assert (found.argmax == expected.argmax).mean() > 0.99  # type: ignore[union-attr]


class TestDistances:
    @pytest.mark.parametrize("distance", DISTANCES)
    def test_a_distance_exports(self, make_checkpoint: Any, tmp_path: Path, distance: str) -> None:
        checkpoint = make_checkpoint(head=HeadConfig(distance=distance))  # type: ignore[arg-type]
        done = _export(checkpoint, tmp_path / "c.onnx")
        assert done.metadata.distance == distance
        _matches_torch(done, checkpoint)

    @pytest.mark.parametrize("distance", ["l2", "linf", "tropical"])
    def test_a_single_prototype_of_two_classes_exports(
        self, make_checkpoint: Any, tmp_path: Path, distance: str
    ) -> None:
        head = HeadConfig(distance=distance, prototypes_per_class=1)  # type: ignore[arg-type]
        checkpoint = make_checkpoint(head=head, num_classes=2, seed=1)
        _matches_torch(_export(checkpoint, tmp_path / "c.onnx"), checkpoint)

    @pytest.mark.parametrize("distance", ["l2", "kl"])
    def test_the_small_epsilons_of_the_definition_survive_the_tracers_optimiser(
        self, make_checkpoint: Any, tmp_path: Path, distance: str
    ) -> None:
        # ONNX optimisers take a scalar of 1e-8 for zero, and x + 0 for x
        done = _export(make_checkpoint(head=HeadConfig(distance=distance)), tmp_path / "c.onnx")  # type: ignore[arg-type]
        model = onnx.load(done.path)
        constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
        added = [
            name
            for node in model.graph.node
            if node.op_type == "Add"
            for name in node.input
            if name in constants and constants[name].size == 1 and 0 < constants[name].item() < 1e-7
        ]
        assert len(added) == (2 if distance == "kl" else 1)


class TestVariants:
    @pytest.mark.parametrize("parts", ANCHORED, ids=str)
    def test_an_anchored_variant_outputs_its_evidence(
        self, make_checkpoint: Any, tmp_path: Path, parts: dict[str, Any]
    ) -> None:
        checkpoint = make_checkpoint(head=HeadConfig(**parts))
        done = _export(checkpoint, tmp_path / "c.onnx")
        assert done.metadata.outputs == ("logits", "argmax", "scores")
        assert done.metadata.evidence == ("exact" if parts["pooling"] == "max" else "map")
        _matches_torch(done, checkpoint)

    @pytest.mark.parametrize("parts", WITHOUT_ANCHORS, ids=str)
    def test_a_variant_without_anchors_outputs_logits_alone(
        self, make_checkpoint: Any, tmp_path: Path, parts: dict[str, Any]
    ) -> None:
        checkpoint = make_checkpoint(head=HeadConfig(**parts))
        done = _export(checkpoint, tmp_path / "c.onnx")
        assert (done.metadata.outputs, done.metadata.evidence) == (("logits",), "none")
        assert [value.name for value in onnx.load(done.path).graph.output] == ["logits"]
        _matches_torch(done, checkpoint)

    @pytest.mark.parametrize("cws", [True, False])
    def test_attention_is_output_on_request(self, make_checkpoint: Any, tmp_path: Path, cws: bool) -> None:
        # without the softmax, attention and projection are one tensor under two names
        checkpoint = make_checkpoint(head=HeadConfig(cws=cws))
        done = _export(checkpoint, tmp_path / "c.onnx", attention=True)
        found = OnnxSession(done.path, device="cpu", threads=2).run(example_images(2, 64, 96))
        assert found.attention is not None
        assert found.attention.shape == (2, 20, 2, 3)
        np.testing.assert_array_equal(found.attention.reshape(2, 20, 6).max(2), found.scores)  # type: ignore[arg-type]

    def test_a_picture_without_any_feature_gets_the_bias_and_not_nan(
        self, make_checkpoint: Any, tmp_path: Path
    ) -> None:
        # all features zero: the norm is zero, and only its epsilon keeps 0 / 0 out of the graph
        head = HeadConfig(projection=False, cws=False, pooling="avg", anchors=False)
        checkpoint = make_checkpoint(head=head)
        with torch.no_grad():
            for parameter in checkpoint.network.backbone.parameters():
                parameter.zero_()
        done = _export(checkpoint, tmp_path / "c.onnx")
        found = OnnxSession(done.path, device="cpu", threads=2).run(example_images(1, 64, 96))
        bias = checkpoint.network.head.classifier.bias.detach().numpy()
        np.testing.assert_allclose(found.logits[0], bias, atol=1e-7)


class TestInputs:
    @pytest.mark.parametrize(
        ("size", "kind"), [((32, 32), "uint8"), ((96, 64), "float32"), ((160, 32), "uint8"), ((32, 32), "float32")]
    )
    def test_a_size_and_kind_export(self, make_checkpoint: Any, tmp_path: Path, size: Any, kind: Any) -> None:
        checkpoint = make_checkpoint(size=size)
        done = _export(checkpoint, tmp_path / "c.onnx", input_kind=kind)
        assert (done.metadata.input_size, done.metadata.input_kind) == (size, kind)
        (images,) = onnx.load(done.path).graph.input
        shape = [d.dim_value for d in images.type.tensor_type.shape.dim[1:]]
        assert shape == ([*size, 3] if kind == "uint8" else [3, *size])
        _matches_torch(done, checkpoint)


@pytest.mark.slow
def test_shufflenet_exports(make_checkpoint: Any, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("shufflenet_v2_x0_5", size=(64, 64))
    assert _export(checkpoint, tmp_path / "c.onnx").comparison


@pytest.mark.data
def test_real_photographs_can_take_the_place_of_creatures(
    make_checkpoint: Any, tmp_path: Path, photographs: Path
) -> None:
    done = _export(make_checkpoint(), tmp_path / "c.onnx", pictures=photographs)
    assert done.metadata.verification["pictures"] == "64 photographs of images"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "resnet50", "resnet101", "resnet152",
            "efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l",
            "convnext_tiny", "convnext_small", "convnext_base",
        )
    ],
)  # fmt: skip
@pytest.mark.timeout(900)
def test_a_random_checkpoint_of_the_papers_backbones_passes_the_gate(
    make_checkpoint: Any, tmp_path: Path, name: str
) -> None:
    done = _export(make_checkpoint(name, size=(224, 224), sharp=False), tmp_path / "c.onnx")
    assert done.comparison
    # a gate that had to open says so
    gate = done.metadata.verification["gate"]
    assert ("rounding" in done.metadata.verification) == (gate["cosine"] > 1e-6 or gate["score"] > 1e-5)
