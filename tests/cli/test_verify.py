"""`opal-deploy verify M`: the test vectors that a model carries, and the ways in which a file is not the one it was."""

import json

import onnx
import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import compute_sha256
from tests.cli.calls import check, one_line

CPU = ("--device", "cpu", "--threads", "1")


def test_an_intact_file_passes(opal, exact_model):
    digest = compute_sha256(exact_model)
    done = check(opal("verify", exact_model, *CPU, "--json", "--expect-sha256", digest.upper()))
    document = json.loads(done.stdout)
    assert (document["passed"], document["images"], document["sha256"]) == (True, 4, digest)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("none", 2, "this is another file"),
        # edited and given a new digest: the digest is right, the outputs are not
        ("edited", 4, "does not reproduce its own test vectors"),
    ],
)
def test_another_file_is_refused_in_one_line(opal, exact_model, tmp_path, change, code, message):
    path = tmp_path / "m.onnx"
    path.write_bytes(exact_model.read_bytes())
    if change == "edited":
        model, metadata = onnx.load(exact_model), onnx_file.read_metadata(exact_model)
        (weight,) = [t for t in model.graph.initializer if t.name.endswith("projection.weight")]
        weight.raw_data = b"\0" * len(weight.raw_data)
        (entry,) = model.metadata_props
        entry.value = entry.value.replace(metadata.file_sha256, "0" * 64)
        onnx.save(model, path)
        onnx_file.embed_digest(path)
    done = opal("verify", path, *CPU, *(["--expect-sha256", "0" * 64] if change == "none" else []))
    assert message in one_line(done, code)
