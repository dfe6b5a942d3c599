"""`export --argmax compare`: cells found by comparisons, against ONNX's ArgMax."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.errors import UsageError
from opal_deploy.export.argmax import compare_cells
from opal_deploy.export.builder import EngineTarget, Network
from opal_deploy.export.exporter import export
from opal_deploy.export.files import ExportTargets
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import EngineOptions, ExportOptions
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version, load
from opal_deploy.runtime.verification import verify_test_vectors
from opal_deploy.synthetic import example_images
from tests.builders import build_checkpoint

NAN, INF = np.nan, np.inf
# six cells, the first of the largest, and what ArgMax says where that is another
CELLS = {
    "the last": ([0, 1, 2, 3, 4, 5], 5, 5),
    "a tie": ([0.1, 0.2, 0.2, 0.1, 0.2, 0], 1, 1),
    "all tie": ([1] * 6, 0, 0),
    "both zeros": ([-0.0, 0.0, -1, -1, -1, -1], 0, 0),
    "denormal numbers": ([1e-42, 3e-42, 3e-42, 0, 0, 0], 1, 1),
    "infinite": ([0, INF, INF, 0, 0, 0], 1, 1),
    "minus infinity": ([-INF] * 6, 0, 0),
    "all NaN": ([NAN] * 6, 0, 0),
    "NaN before and after the maximum": ([1, NAN, 2, NAN, 0, 2], 2, 2),
    "NaN in cell 0": ([NAN, 3, 9, 1, 1, 1], 2, 0),
}


def run_head(values, *, with_scores, compared):
    """Run the head's reductions as `export` writes them on [1, K, 6]."""
    axis = numpy_helper.from_array(np.array([2], np.int64), "axis")
    nodes = [
        helper.make_node("ArgMax", ["attention"], ["index"], axis=2, keepdims=0),
        helper.make_node("Cast", ["index"], ["argmax"], to=TensorProto.INT32),
        helper.make_node("ReduceMax" if with_scores else "ReduceMean", ["attention", "axis"], ["scores"], keepdims=0),
    ]
    shapes = [("argmax", TensorProto.INT32), ("scores", TensorProto.FLOAT)]
    outputs = [helper.make_tensor_value_info(name, kind, ["N", len(values)]) for name, kind in shapes]
    images = helper.make_tensor_value_info("attention", TensorProto.FLOAT, ["N", len(values), 6])
    graph = helper.make_graph(nodes, "head", [images], outputs, [axis])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if compared:
        model = compare_cells(model, 6)
        assert "ArgMax" not in {node.op_type for node in model.graph.node}
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["argmax"], {"attention": np.array([values], np.float32)})[0]


@pytest.mark.parametrize("with_scores", [True, False], ids=["maximum", "average"])
def test_of_equal_maxima_the_first_cell_is_found_and_nan_is_no_maximum(with_scores):
    values, first, argmax = (list(column) for column in zip(*CELLS.values(), strict=True))
    compared = run_head(values, with_scores=with_scores, compared=True)
    assert compared.dtype == np.int32
    assert dict(zip(CELLS, compared[0].tolist(), strict=True)) == dict(zip(CELLS, first, strict=True))
    assert run_head(values, with_scores=with_scores, compared=False)[0].tolist() == argmax


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_a_file_of_either_form_has_the_same_outputs_to_the_bit_and_builds_in_tensorrt(
    write_onnx, tmp_path, precision, pooling
):
    checkpoint = build_checkpoint(head=HeadConfig(pooling=pooling), size=(128, 160), seed=8)
    # of a blank image many cells tie
    images = np.concatenate([example_images(5, 128, 160), np.zeros((1, 128, 160, 3), np.uint8)])
    written = {
        form: write_onnx(checkpoint, tmp_path / form / "c.onnx", precision, argmax=form)
        for form in ("operator", "compare")
    }
    runs = {form: OnnxSession(file.path, device="cpu", threads=1).run(images) for form, file in written.items()}
    for name in ("logits", "scores", "argmax"):
        np.testing.assert_array_equal(*(getattr(outputs, name) for outputs in runs.values()), err_msg=name)
    assert len(np.unique(runs["compare"].argmax)) > 3
    compared = written["compare"]
    assert compared.metadata.exporter["argmax"] == "compare"
    verify_test_vectors(OnnxSession(compared.path, device="cpu", threads=1), "c.onnx")
    if installed_version(TENSORRT_RTX) is not None:
        network = Network(load(TENSORRT_RTX, "a test"), compared.path.read_bytes(), "c.onnx")
        target = EngineTarget(TENSORRT_RTX, "sm80", None, "a test")
        assert network.build(target, EngineOptions(batch="1:2:4")).content


def test_a_files_form_is_kept_in_another_precision_and_listed_with_the_best_classes(fp32, write_onnx, tmp_path):
    compared = write_onnx(build_checkpoint(seed=8), tmp_path / "c.onnx", argmax="compare", outputs="topk", top_k=2)
    assert (compared.metadata.top_k, compared.metadata.exporter["argmax"]) == (2, "compare")
    compared = write_onnx(fp32, tmp_path / "c.fp16.onnx", "fp16", argmax="compare")
    with pytest.raises(UsageError, match=r"exported with other argmax; replace it with --overwrite"):
        write_onnx(fp32, compared.path, "fp16", overwrite=False)
    everything = write_onnx(build_checkpoint(seed=8), tmp_path / "d.onnx", argmax="compare")
    half = write_onnx(everything.path, tmp_path / "d.fp16.onnx", "fp16")
    assert half.metadata.exporter["argmax"] == "compare"
    (kept,) = export(
        OnnxSource(everything.path), ExportTargets({"fp16": half.path}), ExportOptions(argmax="compare", threads=2)
    ).onnx
    assert kept.kept


def test_a_file_that_is_built_as_it_is_and_a_model_without_cells_are_refused(fp32, write_onnx, tmp_path):
    half = write_onnx(fp32, tmp_path / "c.fp16.onnx", "fp16")
    with pytest.raises(UsageError, match="already fp16, so it is built as it is; for --argmax compare give the fp32"):
        OnnxSource(half.path).verify(ExportOptions(argmax="compare", threads=2))
    with pytest.raises(UsageError, match="--argmax compare: the model has only logits"):
        write_onnx(build_checkpoint(head=LINEAR_BASELINE), tmp_path / "c.onnx", argmax="compare")
