"""`opal-deploy verify M`: the test vectors that a model carries, and the digest that a caller expects."""

import json

import numpy as np
import onnx
from onnx import numpy_helper

from opal_deploy.artifact.files import compute_sha256
from tests.cli.calls import check, one_line

CPU = ("--device", "cpu", "--threads", "1")


def test_an_intact_file_passes(opal, exact_model):
    digest = compute_sha256(exact_model)
    done = check(opal("verify", exact_model, *CPU, "--json", "--expect-sha256", digest.upper()))
    document = json.loads(done.stdout)
    assert (document["passed"], document["images"], document["sha256"]) == (True, 4, digest)


def test_a_file_that_is_not_the_pinned_one_is_refused(opal, exact_model, make_pictures, tmp_path):
    make_pictures(tmp_path / "in", 1)
    infer = ("infer", "in", "--no-isolate", *CPU, "--expect-sha256")
    check(opal(*infer, compute_sha256(exact_model).upper(), "--model", exact_model, cwd=tmp_path))
    for path, message in {exact_model: "another file", "nope.engine": "cannot be read", ".": "cannot be read"}.items():
        assert message in one_line(opal(*infer, "0" * 64, "--model", path, cwd=tmp_path))
    assert "another file" in one_line(opal("verify", exact_model, "--expect-sha256", "0" * 64))


def test_a_file_that_a_tool_rewrote_is_resealed_if_it_answers_alike(opal, exact_model, make_pictures, tmp_path):
    make_pictures(tmp_path / "in", 3)
    model = onnx.load(exact_model)
    # as simplifiers do
    for number, node in enumerate(model.graph.node):
        node.name = f"node_{number}"
    onnx.save(model, tmp_path / "m.onnx")
    assert "--reseal" in one_line(opal("export", "m.onnx", cwd=tmp_path))
    check(opal("verify", "m.onnx", "in", "--reseal", exact_model, cwd=tmp_path))
    check(opal("verify", "m.onnx", *CPU, cwd=tmp_path))
    # not the original any more
    assert "metadata" in one_line(opal("verify", "m.onnx", "--reseal", exact_model, cwd=tmp_path))

    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 4)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    assert "differs" in one_line(opal("verify", "other.onnx", "--reseal", exact_model, cwd=tmp_path), 4)
