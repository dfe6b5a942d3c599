"""`export --outputs topk`: the best classes that a graph lists, against a list made with plain Python."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import TOP_OUTPUTS
from opal_deploy.artifact.outputs import TopOutputs, select_top
from opal_deploy.artifact.test_vectors import pack
from opal_deploy.errors import UsageError, VerificationError
from opal_deploy.export.builder import Network
from opal_deploy.export.candidate import with_top_classes
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.graph_edit import add_top_outputs
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import EngineOptions, ExportOptions
from opal_deploy.export.plan import EngineTargets, plan_export
from opal_deploy.export.verification import verify_candidate
from opal_deploy.model.config import LINEAR_BASELINE
from opal_deploy.runtime.devices import Driver
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_test_vectors
from opal_deploy.synthetic import example_images
from tests.builders import build_checkpoint
from tests.export.conftest import SM80

N, C = 50, 10


@pytest.mark.parametrize(("k", "m"), [(1, 5), (10, 3)])
def test_of_equal_logits_the_lowest_class_is_listed_first_and_nan_stays_nan(k, m):
    rng = np.random.default_rng(0)
    arrays = {
        # of few different values: most images have ties, also where the list ends
        "logits": rng.integers(-3, 0, (N, C)).astype(np.float32),
        "scores": rng.random((N, C * m)).astype(np.float32),
        "argmax": rng.integers(0, 49, (N, C * m)).astype(np.int32),
    }
    arrays["logits"][4] = np.nan

    values = [f"float[N, {C}] {{}}logits", f"float[N, {C * m}] {{}}scores", f"int32[N, {C * m}] {{}}argmax"]
    inputs, outputs = (", ".join(values).format(*[prefix] * 3) for prefix in ("in_", ""))
    nodes = "".join(f"{name} = Identity (in_{name})" for name in arrays)
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> head ({inputs}) => ({outputs}) {{ {nodes} }}'
    )
    content = add_top_outputs(model, ClassMap.blocks(C, m), k).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(rows):
        feed = {f"in_{name}": array[rows] for name, array in arrays.items()}
        return TopOutputs(*session.run(list(TOP_OUTPUTS), feed))

    top = run(slice(None))
    # a record depends on its image alone, to the last bit
    for row in range(5):
        assert all(np.array_equal(a[row : row + 1], b, equal_nan=True) for a, b in zip(top, run([row]), strict=True))

    assert [array.dtype for array in top] == [np.int32, np.float32, np.float32, np.int32, np.float32]
    assert np.isnan(top.logits[4]).all()
    for row in set(range(N)) - {4}:
        classes = sorted(range(C), key=lambda c, row=row: (-arrays["logits"][row, c], c))[:k]
        assert top.classes[row].tolist() == classes
        assert top.logits[row].tolist() == arrays["logits"][row, classes].tolist()
        assert top.scores[row].tolist() == arrays["scores"][row].reshape(C, m)[classes].tolist()
        assert top.cells[row].tolist() == arrays["argmax"][row].reshape(C, m)[classes].tolist()
    np.testing.assert_allclose(top.norm, np.linalg.norm(arrays["scores"].astype(np.float64), axis=1), rtol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_an_export_lists_what_all_outputs_say_and_builds_in_tensorrt(fp32, rtx, write_onnx, tmp_path, precision):
    source = build_checkpoint(seed=8) if precision == "fp32" else fp32
    best = write_onnx(source, tmp_path / "best.onnx", precision, outputs="topk", top_k=3)
    assert (best.metadata.outputs, best.metadata.top_k) == (TOP_OUTPUTS, 3)
    # the gate saw every channel, not those of the listed classes alone
    report = best.metadata.verification
    assert report["cells"] + report["cells_tied"] == report["images"] * 4 * 5
    if precision != "bf16":
        images = example_images(9, 64, 96)
        everything = fp32 if precision == "fp32" else write_onnx(fp32, tmp_path / "all.onnx", precision).path
        expected = select_top(OnnxSession(everything, device="cpu", threads=1).run(images), ClassMap.blocks(4, 5), 3)
        session = OnnxSession(best.path, device="cpu", threads=1)
        outputs = session.run(images)
        assert (len(outputs), outputs.scores, outputs.argmax) == (9, None, None)
        for name, before, after in zip(TOP_OUTPUTS, expected, outputs.top, strict=True):
            np.testing.assert_allclose(after, before, rtol=1e-6 if name == "score_norm" else 0, err_msg=name)
        comparison = verify_test_vectors(session, "best.onnx")
        assert comparison.cells + comparison.cells_tied == 4 * 3 * 5
    if rtx is not None:
        assert Network(rtx, best.path.read_bytes(), "best.onnx").build(SM80, EngineOptions(batch="1:2:4"))


def test_a_graph_that_lists_wrongly_is_refused_although_its_other_outputs_are_right(tmp_path):
    source = CheckpointSource(build_checkpoint(), Path("c.pt"))
    candidate = with_top_classes(source.build_candidate(["fp32"], ExportOptions(threads=2)), 2)
    candidate = replace(candidate, metadata=replace(candidate.metadata, test_vectors=pack(candidate.test_vectors)))
    assert verify_candidate(candidate, tmp_path / "m.onnx")
    (table,) = (tensor for tensor in candidate.model.graph.initializer if tensor.name == "select_channel_table")
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table)[..., ::-1].copy(), table.name))
    with pytest.raises(VerificationError, match=r"top_scores is not .*; top_cells is not"):
        verify_candidate(candidate, tmp_path / "m.onnx")


def test_a_file_of_all_outputs_becomes_one_of_the_best_in_another_precision_and_not_back(fp32, write_onnx, tmp_path):
    best = write_onnx(fp32, tmp_path / "best.onnx", "fp16", outputs="topk", top_k=32)
    assert best.metadata.top_k == 4
    engines = EngineTargets([], tmp_path, Driver())
    assert plan_export(OnnxSource(best.path), ExportOptions(outputs="topk", top_k=4), engines).onnx == {}
    with pytest.raises(UsageError, match="built as it is; leave out --outputs"):
        plan_export(OnnxSource(best.path), ExportOptions(outputs="topk", top_k=2), engines)
    best = write_onnx(build_checkpoint(seed=8), tmp_path / "c.onnx", outputs="topk", top_k=2, verify=False)
    with pytest.raises(UsageError, match="outputs only the best 2 classes, and another precision of it needs all"):
        write_onnx(best.path, tmp_path / "x.onnx", "fp16")


def test_a_model_without_evidence_has_none_to_list(write_onnx, tmp_path):
    with pytest.raises(UsageError, match="no evidence to select"):
        write_onnx(build_checkpoint(head=LINEAR_BASELINE), tmp_path / "c.onnx", outputs="topk", top_k=2)
