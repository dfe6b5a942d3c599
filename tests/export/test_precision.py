"""Half precision: of the body alone, from a checkpoint or, without torch, from one of our own files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.artifact import onnx_file
from opal_deploy.errors import ArtifactError, UsageError, VerificationError
from opal_deploy.export.candidate import ExportOptions
from opal_deploy.export.checkpoint_export import export_checkpoint
from opal_deploy.export.onnx_export import export_onnx, file_name
from opal_deploy.export.precision import to_fp16
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verify import verify_vectors


@pytest.fixture(scope="module")
def fp32(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fp32") / "c.onnx"
    checkpoint: Checkpoint = make_checkpoint(seed=2)
    return export_checkpoint(checkpoint, out, ExportOptions(out=out, threads=2)).path


@pytest.fixture(scope="module")
def fp16(fp32: Path) -> Path:
    return export_onnx(fp32, ExportOptions(precision="fp16", threads=2)).path


def _types(path: Path) -> dict[str, int]:
    """Of every value in the graph, by ONNX's own inference."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    return {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}


class TestFromOnnx:
    def test_it_lies_beside_its_source(self, fp16: Path) -> None:
        assert fp16.name == "c.fp16.onnx"

    def test_the_body_is_float16(self, fp16: Path) -> None:
        types = _types(fp16)
        convolutions = [node for node in onnx.load(fp16).graph.node if node.op_type == "Conv"]
        assert len(convolutions) == 3
        assert {types[node.output[0]] for node in convolutions} == {TensorProto.FLOAT16}

    def test_softmax_and_everything_behind_it_is_float32(self, fp16: Path) -> None:
        types = _types(fp16)
        nodes = list(onnx.load(fp16).graph.node)
        names = [node.op_type for node in nodes]
        head = nodes[names.index("Softmax") :]
        floats = {types[name] for node in head for name in node.output} - {TensorProto.INT64, TensorProto.INT32}
        assert floats == {TensorProto.FLOAT}
        assert types["projected"] == TensorProto.FLOAT

    def test_normalisation_is_float32(self, fp16: Path) -> None:
        assert _types(fp16)["normalised"] == TensorProto.FLOAT

    def test_inputs_and_outputs_stay_the_contracts(self, fp16: Path, fp32: Path) -> None:
        before, after = onnx.load(fp32).graph, onnx.load(fp16).graph
        assert list(before.input) == list(after.input)
        assert list(before.output) == list(after.output)

    def test_weights_take_half_the_room(self, fp16: Path, fp32: Path) -> None:
        def weights(path: Path) -> int:
            return sum(len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer)

        assert weights(fp16) < 0.55 * weights(fp32)

    def test_metadata_says_fp16_and_against_what_it_was_verified(self, fp16: Path, fp32: Path) -> None:
        found, source = onnx_file.read_metadata(fp16), onnx_file.read_metadata(fp32)
        assert (found.precision, source.precision) == ("fp16", "fp32")
        assert found.verification["reference"].startswith("c.onnx in ONNX Runtime")
        assert found.test_vectors == source.test_vectors
        assert found.source == source.source

    def test_it_reproduces_the_references_test_vectors(self, fp16: Path) -> None:
        assert verify_vectors(OnnxSession(fp16, device="cpu", threads=2), "c.fp16.onnx")

    def test_it_is_not_the_fp32_file_under_another_name(self, fp16: Path) -> None:
        metadata = onnx_file.read_metadata(fp16)
        assert 1e-6 < metadata.verification["max_cosine"] < 2e-2

    def test_it_needs_no_torch(self, fp32: Path, tmp_path: Path) -> None:
        program = (
            "import sys; sys.modules['torch'] = None; sys.modules['torchvision'] = None\n"
            "from pathlib import Path\n"
            "from opal_deploy.export.onnx_export import ExportOptions, export_onnx\n"
            "export_onnx(Path(sys.argv[1]), ExportOptions(out=Path(sys.argv[2]), precision='fp16', threads=2))\n"
        )
        out = tmp_path / "x.onnx"
        done = subprocess.run(
            [sys.executable, "-c", program, str(fp32), str(out)], capture_output=True, text=True, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        assert onnx_file.read_metadata(out).precision == "fp16"

    def test_a_damaged_source_is_refused(self, fp32: Path, tmp_path: Path) -> None:
        content = bytearray(fp32.read_bytes())
        content[len(content) // 3] ^= 1
        path = tmp_path / "c.onnx"
        path.write_bytes(content)
        with pytest.raises(ArtifactError):
            export_onnx(path, ExportOptions(precision="fp16"))
        assert [p.name for p in tmp_path.iterdir()] == ["c.onnx"]

    @pytest.mark.parametrize(
        "options",
        [
            {"precision": "fp32"},
            {"precision": "fp16", "attention": True},
            {"precision": "fp16", "input_kind": "float32"},
        ],
        ids=str,
    )
    def test_what_is_fixed_in_a_file_cannot_be_asked_for(self, fp32: Path, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            export_onnx(fp32, ExportOptions(**options))

    def test_fp16_is_not_converted_again(self, fp16: Path) -> None:
        with pytest.raises(UsageError, match="fp16 already"):
            export_onnx(fp16, ExportOptions(precision="fp16"))

    def test_the_gate_rejects_a_body_that_half_precision_ruins(self, make_checkpoint: Any, tmp_path: Path) -> None:
        checkpoint: Checkpoint = make_checkpoint(seed=3)
        # activations overflow float16 although no weight does
        first, second = checkpoint.network.backbone.body.first, checkpoint.network.backbone.body.second
        first.weight.data.mul_(3e4)
        first.bias.data.mul_(3e4)
        second.weight.data.div_(3e4)
        out = tmp_path / "c.onnx"
        export_checkpoint(checkpoint, out, ExportOptions(out=out, threads=2))
        with pytest.raises(VerificationError, match="was not written"):
            export_onnx(out, ExportOptions(precision="fp16", threads=2))
        assert [path.name for path in tmp_path.iterdir()] == ["c.onnx"]


class TestFromACheckpoint:
    @pytest.mark.parametrize("kind", ["uint8", "float32"])
    def test_its_body_is_cast_and_verified_against_pytorch(
        self, make_checkpoint: Any, tmp_path: Path, kind: Any
    ) -> None:
        out = tmp_path / "c.onnx"
        options = ExportOptions(out=out, precision="fp16", input_kind=kind, threads=2)
        done = export_checkpoint(make_checkpoint(seed=2), out, options)
        assert done.metadata.verification["reference"].startswith("PyTorch")
        assert _types(out)["projected"] == TensorProto.FLOAT
        assert {t.data_type for t in onnx.load(out).graph.initializer if "body" in t.name} == {TensorProto.FLOAT16}

    @pytest.mark.parametrize("name", ["resnet18", pytest.param("mobilenet_v3_small", marks=pytest.mark.slow)])
    def test_real_architectures_pass(self, make_checkpoint: Any, tmp_path: Path, name: str) -> None:
        out = tmp_path / "c.onnx"
        options = ExportOptions(out=out, precision="fp16", threads=2)
        assert export_checkpoint(make_checkpoint(name, size=(64, 64)), out, options).comparison


def _graph(**weights: Any) -> onnx.ModelProto:
    """normalised -> Mul(w) -> projected, with w read outside the body too."""
    graph = helper.make_graph(
        [
            helper.make_node("Identity", ["images"], ["normalised"]),
            helper.make_node("Mul", ["normalised", "w"], ["projected"]),
            helper.make_node("Add", ["projected", "w"], ["logits"]),
        ],
        "g",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N"])],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


class TestCast:
    def test_a_weight_that_the_head_reads_too_gets_a_twin(self) -> None:
        half = to_fp16(_graph(w=[2.0]))
        types = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
        assert types == {"w": TensorProto.FLOAT, "w_fp16": TensorProto.FLOAT16}
        onnx.checker.check_model(half, full_check=True)

    def test_the_original_stays_as_it_was(self) -> None:
        model = _graph(w=[2.0])
        before = model.SerializeToString()
        to_fp16(model)
        assert model.SerializeToString() == before

    def test_a_weight_beyond_float16_is_refused_by_name(self) -> None:
        with pytest.raises(ArtifactError, match="weight w reaches 1e\\+05"):
            to_fp16(_graph(w=[1e5]))

    def test_a_graph_that_does_not_name_its_body_is_refused(self) -> None:
        model = _graph(w=[2.0])
        model.graph.node[1].output[0] = model.graph.node[2].input[0] = "other"
        with pytest.raises(ArtifactError, match="projected"):
            to_fp16(model)


@pytest.mark.parametrize(
    ("source", "precision", "name"),
    [
        ("a/ckpt.pt", "fp32", "ckpt.onnx"),
        ("a/ckpt.pt", "fp16", "ckpt.fp16.onnx"),
        ("ckpt.onnx", "fp16", "ckpt.fp16.onnx"),
    ],
)
def test_files_are_named_by_the_rule(source: str, precision: Any, name: str) -> None:
    assert file_name(Path(source), precision) == Path(source).with_name(name)
