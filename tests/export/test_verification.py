"""The gate of an export: graphs with one fault each are rejected, and what a rejection says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from opal_deploy.errors import VerificationError
from opal_deploy.export.candidate import Float64Comparison, SampledReference
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import stage_onnx
from opal_deploy.export.graph_edit import BODY_OUTPUT
from opal_deploy.export.options import ExportOptions
from opal_deploy.runtime.gates import WIDEST, Rounding
from opal_deploy.runtime.onnx_session import OnnxSession
from tests.builders import build_checkpoint


def _edit(ending, change):
    """A fault in one initializer's values."""

    def fault(graph):
        tensor = _initializer(graph, ending)
        before = numpy_helper.to_array(tensor)
        after = np.ascontiguousarray(change(before.copy()))
        assert not np.array_equal(before, after), "the fault changes nothing"
        tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))

    return fault


def _set(index, value):
    def change(array):
        array[np.abs(array).argmax() if index is None else index] = value
        return array

    return change


def _swap(one, other):
    def change(array):
        array[[one, other]] = array[[other, one]]
        return array

    def fault(graph):
        for ending in ("projection.weight", "projection.bias"):
            _edit(ending, change)(graph)

    return fault


def _initializer(graph, ending):
    if ending is None:  # the largest weight of all convolutions
        return max((t for t in graph.initializer if len(t.dims) == 4), key=lambda t: np.prod(t.dims))
    (found,) = [tensor for tensor in graph.initializer if tensor.name.endswith(ending)]
    return found


def _insert(graph, name, operator, constants=(), **attributes):
    """A node between `name` and everything that reads it; `constants` are its further inputs."""
    names = [f"fault{index}" for index in range(len(constants))]
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for v, n in zip(constants, names, strict=True))
    nodes = list(graph.node)
    (position,) = [i for i, node in enumerate(nodes) if name in node.output]
    producer = nodes[position]
    producer.output[list(producer.output).index(name)] = f"{name}_before"
    nodes.insert(position + 1, helper.make_node(operator, [f"{name}_before", *names], [name], **attributes))
    del graph.node[:]
    graph.node.extend(nodes)


def _reroute(graph, old, new):
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def _cells_transposed(graph):
    # column-major cells: every score and logit stays as it is
    _insert(graph, BODY_OUTPUT, "Transpose", perm=[0, 1, 3, 2])


def _epsilon_dropped(graph):
    # s / |s| instead of s / (|s| + epsilon)
    norm = next(node for node in graph.node if node.op_type == "Sqrt").output[0]
    (addition,) = [node for node in graph.node if node.op_type == "Add" and norm in node.input]
    graph.node.remove(addition)
    _reroute(graph, addition.output[0], norm)


def _blocks_interleaved(graph):
    # class c takes channels c, c + C, c + 2C, ... instead of c*m ... c*m + m - 1
    divided = {name for node in graph.node if node.op_type == "Div" for name in node.output}
    (reshape,) = [node for node in graph.node if node.op_type == "Reshape" and node.input[0] in divided]
    assert numpy_helper.to_array(_initializer(graph, reshape.input[1])).tolist()[1:] == [4, 5]
    graph.initializer.append(numpy_helper.from_array(np.array([-1, 5, 4], np.int64), "interleaved"))
    reshape.input[1] = "interleaved"
    _insert(graph, reshape.output[0], "Transpose", perm=[0, 2, 1])


def _scores_averaged(graph):
    next(node for node in graph.node if node.op_type == "ReduceMax").op_type = "ReduceMean"


_REVERSED = [np.array([n], np.int64) for n in (-1, -(2**62), 0, -1)]
FAULTS = {
    "BGR for RGB": lambda g: _insert(g, g.node[0].output[0], "Gather", [np.array([2, 1, 0], np.int64)], axis=3),
    "projection rows of two classes swapped": _swap(3, 11),
    # every logit stays as it is, only the evidence is another's
    "projection rows of one class swapped": _swap(0, 1),
    "cells transposed": _cells_transposed,
    # as happens to who copies from a BGR pipeline
    "standard deviations of red and blue exchanged": _edit("scale", lambda scale: scale[:, ::-1]),
    "epsilon dropped": _epsilon_dropped,
    "bias lost": _edit("projection.bias", np.zeros_like),
    "blocks interleaved": _blocks_interleaved,
    # right for one image, wrong for two
    "batch reversed": lambda g: _insert(g, "logits", "Slice", _REVERSED),
    "cells counted from one": lambda g: _insert(g, "argmax", "Add", [np.array(1, np.int32)]),
    "scores averaged": _scores_averaged,
    "not a number": _edit("projection.bias", _set(0, np.nan)),
}
# a network so noisy that the gate is as wide as it may become
NOISIEST = Float64Comparison(graph=Rounding(), float32=Rounding(1.0, 1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def candidate(resnet18):
    return CheckpointSource(resnet18, Path("c.pt")).build_candidate(["fp32"], ExportOptions(threads=2))


def _with(candidate, fault):
    model = onnx.ModelProto()
    model.CopyFrom(candidate.model)
    fault(model.graph)
    return replace(candidate, model=model)


def _write(candidate, out, *, verify=True):
    with stage_onnx(candidate, out, ExportOptions(threads=2, verify=verify)) as staged:
        return staged.exported


def test_the_graph_without_a_fault_passes_and_its_attention_is_not_uniform(candidate, tmp_path):
    # or else the tests below would show nothing
    assert _write(candidate, tmp_path / "m.onnx").comparison
    _, reference = candidate.sample.first(64)
    scores, margin = reference.outputs.scores, reference.top2_margin
    assert scores is not None
    assert margin is not None
    assert scores.max() > 0.5
    assert scores.max() > 20 * scores.min()
    assert (margin > WIDEST.tie).mean() > 0.9


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected_however_noisy_the_network_and_leaves_what_was_there(candidate, tmp_path, fault):
    faulty, out = _with(candidate, FAULTS[fault]), tmp_path / "m.onnx"
    with pytest.raises(VerificationError, match=r"m\.onnx was not written") as error:
        _write(replace(faulty, compare_in_float64=None), out)
    assert ("cells differ" in str(error.value)) >= (fault in ("bias lost", "cells transposed"))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    # nor does a good file of that name suffer
    out.write_bytes(b"good")
    with pytest.raises(VerificationError):
        _write(replace(faulty, compare_in_float64=lambda model: NOISIEST), out)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m.onnx", b"good")]


def test_float64_is_computed_only_when_the_plain_gate_fails(candidate, tmp_path):
    def compare(model):
        raise AssertionError("the plain gate passes")

    # compared with its own outputs a graph passes the plain gate, however PyTorch sums on this machine
    session = OnnxSession(_write(candidate, tmp_path / "own.onnx", verify=False).path, threads=2)
    vectors = replace(candidate.test_vectors, outputs=session.run(candidate.test_vectors.images))
    own = _with_reference(candidate, lambda pixels, _: session.run(pixels))
    own = replace(own, test_vectors=vectors, compare_in_float64=compare)
    assert "float64" not in _write(own, tmp_path / "m.onnx").metadata.verification


def _with_reference(candidate, change):
    """The candidate with a reference whose outputs are `change(images, outputs)`."""

    def run(pixels):
        reference = candidate.sample.run(pixels)
        return replace(reference, outputs=change(pixels, reference.outputs))

    return replace(candidate, sample=SampledReference(candidate.sample.pool, run))


def _noisy(candidate, scale):
    """The candidate with a reference whose scores are off by `scale`, relatively, as reordered sums make them."""

    def move(_, outputs):
        signs = np.random.default_rng(0).choice([-1, 1], outputs.scores.shape).astype(np.float32)
        return replace(outputs, scores=outputs.scores * (1 + scale * signs))

    return _with_reference(candidate, move)


def test_rounding_of_a_runtime_passes_where_the_graph_is_the_network_in_float64(candidate, tmp_path):
    noisy = _noisy(candidate, 8e-6)
    with pytest.raises(VerificationError, match="a cosine differs"):
        _write(replace(noisy, compare_in_float64=None), tmp_path / "m.onnx")
    done = _write(noisy, tmp_path / "m.onnx").metadata.verification
    assert done["float64"]["graph"]["cosine"] < 2.5e-7
    assert 1e-6 < done["gate"]["cosine"] <= WIDEST.cosine


def test_a_normalised_input_is_widened_too():
    options = ExportOptions(threads=1, input="float32")
    candidate = CheckpointSource(build_checkpoint(), Path("c.pt")).build_candidate(["fp32"], options)
    assert candidate.compare_in_float64(candidate.model).graph.cosine < 1e-6


def test_more_than_rounding_of_a_runtime_is_refused(candidate, tmp_path):
    with pytest.raises(VerificationError, match="a cosine differs"):
        _write(_noisy(candidate, 5e-4), tmp_path / "m.onnx")


WEIGHT_FAULTS = {
    "half precision": lambda w: w.astype(np.float16).astype(np.float32),
    "another BatchNorm epsilon": lambda w: w * np.float32(np.sqrt((1 + 1e-5) / (1 + 1e-3))),
    "one wrong weight": _set(0, 1.0),
}


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_in_one_layer_shows_in_float64_behind_any_rounding(candidate, tmp_path, fault):
    with pytest.raises(VerificationError, match="the graph is not the network: in float64"):
        _write(_with(candidate, _edit(None, WEIGHT_FAULTS[fault])), tmp_path / "m.onnx")
