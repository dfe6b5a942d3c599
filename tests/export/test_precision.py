"""Half precision: of the body alone, from a checkpoint or, without torch, from one of our own files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.errors import ArtifactError, UsageError, VerificationError
from opal_deploy.export.candidate import ExportOptions, choose_images
from opal_deploy.export.checkpoint_export import export_checkpoint
from opal_deploy.export.graph import ExportGraph, trace
from opal_deploy.export.onnx_export import export_onnx, file_name
from opal_deploy.export.precision import simulate_low_precision, to_bf16, to_fp16
from opal_deploy.export.quantization import to_int8
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_test_vectors
from opal_deploy.synthetic import example_images


@pytest.fixture(scope="module")
def fp32(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fp32") / "c.onnx"
    checkpoint: Checkpoint = make_checkpoint(seed=8)
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
        assert verify_test_vectors(OnnxSession(fp16, device="cpu", threads=2), "c.fp16.onnx")

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
        done = export_checkpoint(make_checkpoint(seed=8), out, options)
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


class TestRounding:
    """The twin computes in float32 what a narrow body gives, rounded after every operation."""

    @staticmethod
    def run(model: onnx.ModelProto, values: list[float]) -> list[float]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(["projected"], {"images": np.array(values, np.float32)})[0])

    @staticmethod
    def square_root_of_square() -> onnx.ModelProto:
        graph = helper.make_graph(
            [
                helper.make_node("Identity", ["images"], ["normalised"]),
                helper.make_node("Mul", ["normalised", "normalised"], ["squared"]),
                helper.make_node("Sqrt", ["squared"], ["projected"]),
            ],
            "g",
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N"])],
            [helper.make_tensor_value_info("projected", TensorProto.FLOAT, ["N"])],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def test_an_overflow_that_onnx_runtime_hides_on_cpus_shows(self) -> None:
        half = to_fp16(self.square_root_of_square())
        # 300 * 300 is beyond float16; ONNX Runtime computes it in float32 all the same
        assert self.run(half, [300.0]) == [300.0]
        assert self.run(simulate_low_precision(half), [300.0, 3.0]) == [np.inf, 3.0]

    @pytest.mark.parametrize(
        ("convert", "dtype"), [(to_fp16, np.float16), (to_bf16, ml_dtypes.bfloat16)], ids=["fp16", "bf16"]
    )
    def test_every_step_is_rounded_as_numpy_rounds_it(self, convert: Any, dtype: Any) -> None:
        values = np.linspace(0.1, 7, 101).astype(np.float32)
        narrow = values.astype(dtype)
        squared = (narrow.astype(np.float32) ** 2).astype(dtype)
        expected = np.sqrt(squared.astype(np.float32)).astype(dtype).astype(np.float32)
        found = self.run(simulate_low_precision(convert(self.square_root_of_square())), list(values))
        np.testing.assert_array_equal(found, expected)
        assert (np.abs(expected - values) > 0).any()

    def test_values_keep_their_names(self) -> None:
        half = to_fp16(self.square_root_of_square())
        made = {name for node in simulate_low_precision(half).graph.node for name in node.output}
        assert {name for node in half.graph.node for name in node.output} <= made

    def test_the_gate_says_that_it_emulated(self, fp16: Path) -> None:
        report = onnx_file.read_metadata(fp16).verification
        assert report["candidate"].endswith("fp16 emulated: rounded after every operation")
        assert report["worst_picture"].startswith("creature ")


@pytest.fixture(scope="module")
def bf16(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bf16") / "c.bf16.onnx"
    options = ExportOptions(out=out, precision="bf16", threads=2)
    return export_checkpoint(make_checkpoint(seed=8), out, options).path


class TestBf16:
    def test_the_backbone_is_bfloat16_and_the_projection_float32(self, bf16: Path) -> None:
        types = _types(bf16)
        convolutions = [types[n.output[0]] for n in onnx.load(bf16).graph.node if n.op_type == "Conv"]
        assert convolutions == [TensorProto.BFLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT]

    def test_its_operators_take_bfloat16(self, bf16: Path) -> None:
        model = onnx.load(bf16)
        assert model.opset_import[0].version == 22
        assert model.ir_version == 10
        onnx.checker.check_model(model, full_check=True)

    def test_onnx_runtime_refuses_it_in_one_line_that_says_what_it_is_for(self, bf16: Path) -> None:
        with pytest.raises(UsageError, match=r"no bfloat16 convolutions.*opal-deploy export c\.bf16\.onnx --trt"):
            OnnxSession(bf16, device="cpu", threads=1)

    def test_it_is_rounded_more_coarsely_than_half_precision(self, bf16: Path, make_checkpoint: Any) -> None:
        half = bf16.with_name("c.fp16.onnx")
        export_checkpoint(make_checkpoint(seed=8), half, ExportOptions(out=half, precision="fp16", threads=2))
        reports = [onnx_file.read_metadata(path).verification for path in (half, bf16)]
        assert reports[0]["max_cosine"] < reports[1]["max_cosine"] < 5e-2

    def test_a_weight_beyond_float16_is_no_hindrance(self) -> None:
        cast = to_bf16(_graph(w=[1e5]))
        assert TensorProto.BFLOAT16 in {tensor.data_type for tensor in cast.graph.initializer}


@pytest.fixture(scope="module")
def quantised(make_checkpoint: Any) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    checkpoint = make_checkpoint("resnet18", size=(64, 64))
    model = trace(ExportGraph(checkpoint.network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    return model, to_int8(model, example_images(16, 64, 64), build_metadata(checkpoint))


class TestInt8:
    def test_weights_and_activations_have_quantise_and_dequantise_nodes(self, quantised: Any) -> None:
        _, model = quantised
        made_by = {name: node for node in model.graph.node for name in node.output}
        inputs = [
            [made_by[name].op_type if name in made_by else "weight" for name in node.input[:2]]
            for node in model.graph.node
            if node.op_type == "Conv"
        ]
        # all but the first convolution and the projection
        assert inputs.count(["DequantizeLinear", "DequantizeLinear"]) == len(inputs) - 2
        assert inputs[0][1] == inputs[-1][1] == "weight"

    def test_weights_are_scaled_by_channel_and_zero_stays_zero(self, quantised: Any) -> None:
        _, model = quantised
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        zero_points = [weights[n.input[2]] for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert zero_points
        assert {point.dtype for point in zero_points} == {np.dtype(np.int8)}
        assert not any(point.any() for point in zero_points)
        scales = [weights[n.input[1]].size for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert {64, 128, 256, 512} <= set(scales)

    def test_inputs_outputs_and_formats_stay_the_contracts(self, quantised: Any) -> None:
        before, after = quantised
        assert list(before.graph.input) == list(after.graph.input)
        assert list(before.graph.output) == list(after.graph.output)
        assert after.ir_version == 10
        onnx.checker.check_model(after, full_check=True)

    def test_without_photographs_it_is_refused(self, fp32: Path) -> None:
        with pytest.raises(UsageError, match="needs --calibrate DIR"):
            export_onnx(fp32, ExportOptions(precision="int8", threads=2))

    def test_too_few_photographs_are_refused(self, fp32: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"0 readable pictures to calibrate with .*at least 16 are needed"):
            export_onnx(fp32, ExportOptions(precision="int8", calibrate=tmp_path, threads=2))

    @pytest.mark.data
    def test_the_pictures_that_judge_are_not_those_that_it_was_calibrated_with(
        self, fp32: Path, photographs: Path
    ) -> None:
        metadata = onnx_file.read_metadata(fp32)
        judges, calibration = choose_images(ExportOptions(precision="int8", calibrate=photographs), metadata)
        assert calibration is not None
        assert (len(calibration.names), len(judges.names)) == (128, 64)
        assert not set(calibration.names) & set(judges.names)
        # spread over all classes, not the first of them
        assert len({Path(name).parent for name in judges.names}) == 10

    @pytest.mark.data
    def test_a_network_that_int8_ruins_is_refused_with_picture_and_layer(
        self, make_checkpoint: Any, photographs: Path, tmp_path: Path
    ) -> None:
        checkpoint = make_checkpoint("resnet18", size=(64, 64))
        out = tmp_path / "c.int8.onnx"
        options = ExportOptions(out=out, precision="int8", calibrate=photographs, threads=2)
        with pytest.raises(VerificationError, match=r"at least 97 % must.*worst on .*\.jpg, where .* is furthest off"):
            export_checkpoint(checkpoint, out, options)
        assert list(tmp_path.iterdir()) == []


class TestNoVerify:
    def test_it_is_on_record_and_infer_repeats_it(
        self, fp32: Path, opal: Any, make_pictures: Any, tmp_path: Path
    ) -> None:
        out = tmp_path / "c.fp16.onnx"
        done = export_onnx(fp32, ExportOptions(out=out, precision="fp16", verify=False, threads=2))
        assert done.comparison is None
        assert onnx_file.read_metadata(out).verification == {"skipped": "exported with --no-verify"}
        make_pictures(tmp_path / "in", 1)
        inferred = opal("infer", "in", "--model", out, cwd=tmp_path)
        assert inferred.returncode == 0
        assert "NOT VERIFIED: this model was exported with --no-verify" in inferred.stderr
        assert "NO: exported with --no-verify" in opal("inspect", out).stderr

    def test_its_vectors_can_be_checked_all_the_same(self, fp32: Path, tmp_path: Path) -> None:
        out = tmp_path / "c.fp16.onnx"
        export_onnx(fp32, ExportOptions(out=out, precision="fp16", verify=False, threads=2))
        assert verify_test_vectors(OnnxSession(out, device="cpu", threads=2), "c.fp16.onnx")
