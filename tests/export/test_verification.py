"""The gate of an export: graphs with one fault each are rejected, and what a rejection says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from opal_deploy.errors import VerificationError
from opal_deploy.export.candidate import ExportCandidate
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import ExportedOnnx, stage_onnx
from opal_deploy.export.graph_edit import BODY_OUTPUT
from opal_deploy.export.options import ExportOptions
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import WIDEST, Rounding

Fault = Callable[[onnx.GraphProto], None]


def _initializer(graph: onnx.GraphProto, ending: str) -> onnx.TensorProto:
    (found,) = [tensor for tensor in graph.initializer if tensor.name.endswith(ending)]
    return found


def _edit(graph: onnx.GraphProto, ending: str, change: Callable[[Any], Any]) -> None:
    tensor = _initializer(graph, ending)
    before = numpy_helper.to_array(tensor)
    after = np.ascontiguousarray(change(before.copy()))
    assert not np.array_equal(before, after), "the fault changes nothing"
    tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))


def _insert(graph: onnx.GraphProto, name: str, make: Callable[[str, str], list[onnx.NodeProto]]) -> None:
    """Nodes between `name` and everything that reads it."""
    moved = f"{name}_before"
    (position,) = [i for i, node in enumerate(graph.node) if name in node.output]
    nodes = list(graph.node)
    producer = nodes[position]
    producer.output[list(producer.output).index(name)] = moved
    nodes[position + 1 : position + 1] = make(moved, name)
    del graph.node[:]
    graph.node.extend(nodes)


def _constant(graph: onnx.GraphProto, name: str, values: Any) -> str:
    graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    return name


def bgr_for_rgb(graph: onnx.GraphProto) -> None:
    order = _constant(graph, "bgr", np.array([2, 1, 0], np.int64))
    first = graph.node[0].output[0]
    _insert(graph, first, lambda before, after: [helper.make_node("Gather", [before, order], [after], axis=3)])


def projection_rows_swapped(graph: onnx.GraphProto) -> None:
    def swap(array: Any) -> Any:
        array[[3, 11]] = array[[11, 3]]
        return array

    _edit(graph, "projection.weight", swap)
    _edit(graph, "projection.bias", swap)


def neighbouring_projection_rows_swapped(graph: onnx.GraphProto) -> None:
    """Within one block: every logit stays as it is, only the evidence is another's."""

    def swap(array: Any) -> Any:
        array[[0, 1]] = array[[1, 0]]
        return array

    _edit(graph, "projection.weight", swap)
    _edit(graph, "projection.bias", swap)


def cells_transposed(graph: onnx.GraphProto) -> None:
    """Column-major cells: every score and logit stays as it is."""
    make = [helper.make_node("Transpose", [BODY_OUTPUT], ["turned"], perm=[0, 1, 3, 2])]
    (position,) = [i for i, node in enumerate(graph.node) if BODY_OUTPUT in node.output]
    nodes = list(graph.node)
    for node in nodes[position + 1 :]:
        for index, name in enumerate(node.input):
            if name == BODY_OUTPUT:
                node.input[index] = "turned"
    nodes[position + 1 : position + 1] = make
    del graph.node[:]
    graph.node.extend(nodes)


def wrong_standard_deviation(graph: onnx.GraphProto) -> None:
    # 0.229 and 0.225 for red and blue exchanged, as happens to who copies from a BGR pipeline
    _edit(graph, "scale", lambda scale: scale[:, ::-1])


def slightly_wrong_standard_deviation(graph: onnx.GraphProto) -> None:
    _edit(graph, "scale", lambda scale: scale * np.float32(0.229 / 0.225))


def wrong_mean(graph: onnx.GraphProto) -> None:
    _edit(graph, "shift", lambda shift: shift + np.float32(0.01))


def epsilon_dropped(graph: onnx.GraphProto) -> None:
    """s / |s| instead of s / (|s| + epsilon)."""
    norm = next(node for node in graph.node if node.op_type == "ReduceL2").output[0]
    (addition,) = [node for node in graph.node if node.op_type == "Add" and norm in node.input]
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == addition.output[0]:
                node.input[index] = norm
    graph.node.remove(addition)


def bias_lost(graph: onnx.GraphProto) -> None:
    _edit(graph, "projection.bias", np.zeros_like)


def one_bias_lost(graph: onnx.GraphProto) -> None:
    def lose(bias: Any) -> Any:
        bias[int(np.abs(bias).argmax())] = 0.0
        return bias

    _edit(graph, "projection.bias", lose)


def blocks_interleaved(graph: onnx.GraphProto) -> None:
    """Class c takes channels c, c + C, c + 2C, ... instead of c*m ... c*m + m - 1."""
    (reshape,) = [node for node in graph.node if node.op_type == "Reshape" and _is_division(graph, node.input[0])]
    target = numpy_helper.to_array(_initializer(graph, reshape.input[1]))
    assert target.tolist()[1:] == [4, 5]
    swapped = _constant(graph, "interleaved", np.array([-1, 5, 4], np.int64))
    reshape.input[1] = swapped
    out = reshape.output[0]
    _insert(graph, out, lambda before, after: [helper.make_node("Transpose", [before], [after], perm=[0, 2, 1])])


def _is_division(graph: onnx.GraphProto, name: str) -> bool:
    return any(node.op_type == "Div" and name in node.output for node in graph.node)


def batch_mixed(graph: onnx.GraphProto) -> None:
    """Answers of a batch in reverse order: right for one picture, wrong for two."""
    starts, ends = (
        _constant(graph, "s", np.array([-1], np.int64)),
        _constant(graph, "e", np.array([-(2**62)], np.int64)),
    )
    axes, steps = _constant(graph, "a", np.array([0], np.int64)), _constant(graph, "st", np.array([-1], np.int64))
    _insert(
        graph,
        "logits",
        lambda before, after: [helper.make_node("Slice", [before, starts, ends, axes, steps], [after])],
    )


def last_argmax_of_equals(graph: onnx.GraphProto) -> None:
    """Cells counted from one."""
    one = _constant(graph, "one", np.array(1, np.int32))
    _insert(graph, "argmax", lambda before, after: [helper.make_node("Add", [before, one], [after])])


def scores_averaged(graph: onnx.GraphProto) -> None:
    next(node for node in graph.node if node.op_type == "ReduceMax").op_type = "ReduceMean"


def argmax_as_int64(graph: onnx.GraphProto) -> None:
    (output,) = [value for value in graph.output if value.name == "argmax"]
    output.type.tensor_type.elem_type = TensorProto.INT64
    for node in graph.node:
        if "argmax" in node.output:
            node.attribute[0].i = TensorProto.INT64


def not_a_number(graph: onnx.GraphProto) -> None:
    def spoil(bias: Any) -> Any:
        bias[0] = np.nan
        return bias

    _edit(graph, "projection.bias", spoil)


FAULTS: list[Fault] = [
    bgr_for_rgb,
    projection_rows_swapped,
    neighbouring_projection_rows_swapped,
    cells_transposed,
    wrong_standard_deviation,
    slightly_wrong_standard_deviation,
    wrong_mean,
    epsilon_dropped,
    bias_lost,
    one_bias_lost,
    blocks_interleaved,
    batch_mixed,
    last_argmax_of_equals,
    scores_averaged,
    argmax_as_int64,
    not_a_number,
]
# what float32's rounding could never be mistaken for, however noisy the network
NOISIEST = Rounding(cosine=1.0, score=1.0, relative_score=1.0)


@pytest.fixture(scope="module")
def candidate(resnet18: Checkpoint) -> ExportCandidate:
    built = CheckpointSource(resnet18, Path("c.pt")).build_candidate(["fp32"], ExportOptions(threads=2))
    assert built.measure_rounding is not None
    # measured once for all faults: it is the network's, not the fault's
    measured = built.measure_rounding()
    return replace(built, measure_rounding=lambda: measured)


def _with(candidate: ExportCandidate, fault: Fault) -> ExportCandidate:
    model = onnx.ModelProto()
    model.CopyFrom(candidate.model)
    fault(model.graph)
    return replace(candidate, model=model)


def _write(candidate: ExportCandidate, out: Path, *, verify: bool = True) -> ExportedOnnx:
    with stage_onnx(candidate, out, ExportOptions(threads=2, verify=verify)) as staged:
        return staged.exported


def test_the_graph_without_a_fault_passes(candidate: ExportCandidate, tmp_path: Path) -> None:
    # or else the tests below would show nothing
    assert _write(candidate, tmp_path / "m.onnx").comparison


def test_the_attention_of_these_tests_is_not_uniform(candidate: ExportCandidate) -> None:
    scores, margin = candidate.reference.outputs.scores, candidate.reference.top2_margin
    assert scores is not None
    assert margin is not None
    assert scores.max() > 0.5
    assert scores.max() > 20 * scores.min()
    assert (margin > WIDEST.tie).mean() > 0.9


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_rejected_however_noisy_the_network_and_leaves_no_file(
    candidate: ExportCandidate, tmp_path: Path, fault: Fault
) -> None:
    faulty = _with(candidate, fault)
    with pytest.raises(VerificationError, match=r"m\.onnx was not written"):
        _write(faulty, tmp_path / "m.onnx")
    with pytest.raises(VerificationError):
        _write(replace(faulty, measure_rounding=lambda: NOISIEST), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [bias_lost, cells_transposed], ids=lambda fault: fault.__name__)
def test_a_good_file_of_that_name_survives_a_bad_export(
    candidate: ExportCandidate, tmp_path: Path, fault: Fault
) -> None:
    out = tmp_path / "m.onnx"
    _write(candidate, out)
    before = out.read_bytes()
    with pytest.raises(VerificationError) as error:
        _write(_with(candidate, fault), out)
    assert "cells differ" in str(error.value)
    assert "\n" not in str(error.value)
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_rounding_is_measured_only_when_the_plain_gate_fails(candidate: ExportCandidate, tmp_path: Path) -> None:
    def measure() -> Rounding:
        raise AssertionError("the plain gate passes")

    # held against its own outputs a graph passes the plain gate, however PyTorch sums on this machine
    session = OnnxSession(_write(candidate, tmp_path / "own.onnx", verify=False).path, threads=2)
    reference, vectors = (
        replace(part, outputs=session.run(part.images)) for part in (candidate.reference, candidate.test_vectors)
    )
    own = replace(candidate, reference=reference, test_vectors=vectors, measure_rounding=measure)
    assert "rounding" not in _write(own, tmp_path / "m.onnx").metadata.verification


def test_a_network_noisier_than_the_gate_passes_with_its_noise_on_record(
    candidate: ExportCandidate, tmp_path: Path
) -> None:
    # a movement of 3e-6 in the scores, as reordered sums make
    scores = candidate.reference.outputs.scores
    assert scores is not None
    moved = scores * (1 + 8e-6 * np.random.default_rng(0).choice([-1, 1], scores.shape).astype(np.float32))
    outputs = replace(candidate.reference.outputs, scores=moved)
    noisy = replace(candidate, reference=replace(candidate.reference, outputs=outputs))
    with pytest.raises(VerificationError, match="a cosine differs"):
        _write(replace(noisy, measure_rounding=None), tmp_path / "m.onnx")
    measured = Rounding(cosine=5e-6, score=8e-6, relative_score=8e-6)
    done = _write(replace(noisy, measure_rounding=lambda: measured), tmp_path / "m.onnx")
    assert done.metadata.verification["rounding"]["cosine"] == 5e-6
    assert 1e-5 <= done.metadata.verification["gate"]["cosine"] <= WIDEST.cosine
