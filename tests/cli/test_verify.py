"""`opal-deploy verify M`: the test vectors that a model carries, and the digest that a caller expects."""

import json

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
