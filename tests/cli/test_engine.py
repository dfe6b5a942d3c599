"""Commands with an engine on a machine without a GPU: one line and exit 2, or what needs no GPU."""

import json
import shutil

import pytest

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.runtime.devices import read_driver
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version
from tests.cli.calls import check

pytestmark = [
    pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed"),
    pytest.mark.skipif(bool(read_driver().gpus), reason="there is a GPU here, on which engines run"),
]


@pytest.fixture(scope="module")
def built(opal, exact_model, tmp_path_factory):
    """A folder with an fp32 ONNX file, its fp16 file and an engine."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copy(exact_model, folder / "ckpt.onnx")
    check(opal("export", "ckpt.onnx", "--trt", "--batch", "1:2:4", "--threads", "1", cwd=folder))
    return folder


@pytest.fixture
def engine(built):
    return built / "ckpt.fp16.sm80.rtx.engine"


def test_inspect_describes_it_without_running_it_and_shows_damage(opal, engine, tmp_path):
    shown = opal("inspect", engine).stderr
    for part in ("tensorrt-rtx 1.", "sm80, batches 1:2:4", "ckpt.fp16.onnx", "unverified", "matches the file"):
        assert part in shown
    document = json.loads(opal("inspect", engine, "--json").stdout)
    assert (document["kind"], document["intact"], document["checks"]) == ("engine", True, [])
    assert document["metadata"]["test_vectors"] == {"images": 4}
    for path in engine.parent.glob(f"{engine.name}*"):
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / engine.name).write_bytes(engine.read_bytes()[:-1] + b"?")
    assert json.loads(opal("inspect", tmp_path / engine.name, "--json").stdout)["intact"] is False


def test_infer_refuses_a_model_that_is_not_the_pinned_one(opal, built, make_pictures, tmp_path):
    make_pictures(tmp_path / "in", 1)
    model = built / "ckpt.onnx"
    accepted = opal("infer", "in", "--model", model, "--expect-sha256", compute_sha256(model).upper(), cwd=tmp_path)
    assert accepted.returncode == 0, accepted.stderr
    refusals = {model: "this is another file", "nope.engine": "cannot be read", ".": "cannot be read"}
    for path, message in refusals.items():
        refused = opal("infer", "in", "--model", path, "--expect-sha256", "0" * 64, cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
