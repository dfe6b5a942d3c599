"""float16 and bfloat16 bodies of graphs, and their simulation in float32."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.errors import ArtifactError
from opal_deploy.export.precision import simulate_low_precision, to_bf16, to_fp16
from opal_deploy.runtime.openvino_session import OpenvinoSession
from opal_deploy.runtime.verification import verify_test_vectors, wide_batch
from tests.builders import build_checkpoint


def _types(model):
    """The type of every value in the graph, by ONNX's own inference."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}


@pytest.fixture(scope="module")
def original(fp32):
    return onnx.load(fp32)


@pytest.fixture(scope="module")
def half(original):
    return to_fp16(original)


class TestFp16:
    def test_the_body_is_float16_between_float32_normalisation_and_head(self, half):
        types, nodes = _types(half), list(half.graph.node)
        convolutions = [types[node.output[0]] for node in nodes if node.op_type == "Conv"]
        assert convolutions == [TensorProto.FLOAT16] * 3
        assert types["normalised"] == types["projected"] == TensorProto.FLOAT
        head = nodes[[node.op_type for node in nodes].index("Softmax") :]
        floats = {types[name] for node in head for name in node.output} - {TensorProto.INT64, TensorProto.INT32}
        assert floats == {TensorProto.FLOAT}


def _model(nodes, output, initializers=()):
    """A graph from `images` [N] to one output [N]."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in ("images", output)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _graph(weight):
    """normalised -> Mul(w) -> projected, with w read outside the body too."""
    nodes = [
        helper.make_node("Identity", ["images"], ["normalised"]),
        helper.make_node("Mul", ["normalised", "w"], ["projected"]),
        helper.make_node("Add", ["projected", "w"], ["logits"]),
    ]
    return _model(nodes, "logits", [numpy_helper.from_array(np.array([weight], np.float32), "w")])


class TestCast:
    def test_a_weight_that_the_head_reads_too_gets_a_narrow_copy_and_the_original_stays(self):
        model = _graph(2.0)
        before = model.SerializeToString()
        half = to_fp16(model)
        assert model.SerializeToString() == before
        types = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
        assert types == {"w": TensorProto.FLOAT, "w_fp16": TensorProto.FLOAT16}
        onnx.checker.check_model(half, full_check=True)

    def test_a_weight_beyond_float16_is_refused_by_name(self):
        with pytest.raises(ArtifactError, match="weight w reaches 1e\\+05"):
            to_fp16(_graph(1e5))


class TestSimulation:
    """A simulated graph computes in float32 what a narrow body gives, rounded after every operation."""

    @staticmethod
    def run(model, values):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(["projected"], {"images": np.array(values, np.float32)})[0])

    @staticmethod
    def square_root_of_square():
        nodes = [
            helper.make_node("Identity", ["images"], ["normalised"]),
            helper.make_node("Mul", ["normalised", "normalised"], ["squared"]),
            helper.make_node("Sqrt", ["squared"], ["projected"]),
        ]
        return _model(nodes, "projected")

    def test_an_overflow_that_onnx_runtime_hides_on_cpus_shows(self):
        half = to_fp16(self.square_root_of_square())
        # 300 * 300 is beyond float16; ONNX Runtime computes it in float32 all the same
        assert self.run(half, [300.0]) == [300.0]
        assert self.run(simulate_low_precision(half), [300.0, 3.0]) == [np.inf, 3.0]

    @pytest.mark.parametrize(
        ("convert", "dtype"), [(to_fp16, np.float16), (to_bf16, ml_dtypes.bfloat16)], ids=["fp16", "bf16"]
    )
    def test_every_step_is_rounded_as_numpy_rounds_it(self, convert, dtype):
        values = np.linspace(0.1, 7, 101).astype(np.float32)
        narrow = values.astype(dtype)
        squared = (narrow.astype(np.float32) ** 2).astype(dtype)
        expected = np.sqrt(squared.astype(np.float32)).astype(dtype).astype(np.float32)
        narrow_model = convert(self.square_root_of_square())
        found = self.run(simulate_low_precision(narrow_model), list(values))
        np.testing.assert_array_equal(found, expected)
        assert (np.abs(expected - values) > 0).any()
        made = {name for node in simulate_low_precision(narrow_model).graph.node for name in node.output}
        assert {name for node in narrow_model.graph.node for name in node.output} <= made


@pytest.fixture(scope="module")
def bf16(write_onnx, tmp_path_factory):
    return write_onnx(build_checkpoint(seed=8), tmp_path_factory.mktemp("bf16") / "c.bf16.onnx", "bf16").path


class TestBf16:
    def test_the_backbone_is_bfloat16_and_the_projection_float32(self, bf16):
        model = onnx.load(bf16)
        types = _types(model)
        convolutions = [types[n.output[0]] for n in model.graph.node if n.op_type == "Conv"]
        assert convolutions == [TensorProto.BFLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT]
        assert (model.opset_import[0].version, model.ir_version) == (22, 10)
        onnx.checker.check_model(model, full_check=True)

    def test_openvino_runs_it(self, bf16):
        session = OpenvinoSession(bf16, threads=1)
        assert verify_test_vectors(session, "the file", wide_batch(session.metadata))
        assert session.description.endswith(" bf16")
