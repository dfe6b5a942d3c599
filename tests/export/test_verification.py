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


def _cells_transposed(graph):
    # column-major cells: every score and logit stays as it is
    _insert(graph, BODY_OUTPUT, "Transpose", perm=[0, 1, 3, 2])


_REVERSED = [np.array([n], np.int64) for n in (-1, -(2**62), 0, -1)]
FAULTS = {
    "BGR for RGB": lambda g: _insert(g, g.node[0].output[0], "Gather", [np.array([2, 1, 0], np.int64)], axis=3),
    "cells transposed": _cells_transposed,
    # as happens to who copies from a BGR pipeline
    "standard deviations of red and blue exchanged": _edit("scale", lambda scale: scale[:, ::-1]),
    "bias lost": _edit("projection.bias", np.zeros_like),
    # right for one image, wrong for two
    "batch reversed": lambda g: _insert(g, "logits", "Slice", _REVERSED),
    "not a number": _edit("projection.bias", lambda bias: np.full_like(bias, np.nan)),
}
# a network so noisy that the gate is as wide as it may become
NOISIEST = Float64Comparison(graph=Rounding(), float32=Rounding(1.0, 1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def candidate(resnet):
    return CheckpointSource(resnet, Path("c.pt")).build_candidate(["fp32"], ExportOptions(threads=2))


def _with(candidate, fault):
    model = onnx.ModelProto()
    model.CopyFrom(candidate.model)
    fault(model.graph)
    return replace(candidate, model=model)


def _write(candidate, out):
    with stage_onnx(candidate, out, ExportOptions(threads=2)) as staged:
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
        _write(replace(faulty, compare_in_float64=lambda model, images: NOISIEST), out)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m.onnx", b"good")]


def _noisy(candidate, scale):
    """The candidate with a reference whose scores are off by `scale`, relatively, as reordered sums make them."""

    def run(pixels):
        reference = candidate.sample.run(pixels)
        scores = reference.outputs.scores
        signs = np.random.default_rng(0).choice([-1, 1], scores.shape).astype(np.float32)
        return replace(reference, outputs=replace(reference.outputs, scores=scores * (1 + scale * signs)))

    return replace(candidate, sample=SampledReference(candidate.sample.pool, run))


def test_rounding_of_a_runtime_passes_where_the_graph_is_the_network_in_float64(candidate, tmp_path):
    noisy = _noisy(candidate, 8e-6)
    # more than rounding, or nothing that shows it to be rounding
    for refused in (_noisy(candidate, 5e-4), replace(noisy, compare_in_float64=None)):
        with pytest.raises(VerificationError, match="a cosine differs"):
            _write(refused, tmp_path / "m.onnx")
    done = _write(noisy, tmp_path / "m.onnx").metadata.verification
    assert done["float64"]["graph"]["cosine"] < 2.5e-7
    assert 1e-6 < done["gate"]["cosine"] <= WIDEST.cosine


def test_the_second_look_takes_the_image_that_is_furthest_off(candidate, tmp_path):
    furthest, looked_at = candidate.sample.first(64)[0].pixels[-1], []

    def run(pixels):
        reference = candidate.sample.run(pixels)
        reference.outputs.scores[(pixels == furthest).all(axis=(1, 2, 3)), ::2] *= 1 + 2e-5
        return reference

    sample = SampledReference(candidate.sample.pool, run)
    compared = replace(
        candidate, sample=sample, compare_in_float64=lambda _, images: looked_at.extend(images) or NOISIEST
    )
    _write(compared, tmp_path / "m.onnx")
    assert [np.array_equal(image, furthest) for image in looked_at] == [True] + 7 * [False]


def test_a_normalised_input_is_widened_too():
    options = ExportOptions(threads=1, input="float32")
    candidate = CheckpointSource(build_checkpoint(), Path("c.pt")).build_candidate(["fp32"], options)
    assert candidate.compare_in_float64(candidate.model, candidate.sample.first(8)[0].pixels).graph.cosine < 1e-6


def test_a_fault_in_one_layer_shows_in_float64_behind_any_rounding(candidate, tmp_path):
    halved = _edit(None, lambda weights: weights.astype(np.float16).astype(np.float32))
    with pytest.raises(VerificationError, match="in float64"):
        _write(_with(candidate, halved), tmp_path / "m.onnx")
