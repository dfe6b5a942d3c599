"""An edited model deployed: wherever it runs, records are those of the slots that are left."""

import pytest

import opal_deploy
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version
from tests.cli.calls import read_results
from tests.conftest import LEFT


@pytest.fixture(scope="module")
def images(make_pictures, tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("images"), 4)


@pytest.mark.parametrize("how", [("--explain", "--sheets"), ("--processes", "2")], ids=" ".join)
def test_infer_records_the_slots_that_are_left(edited_model, images, tmp_path, opal, how):
    done = opal("infer", images[0].parent, "--model", edited_model, "--out", tmp_path / "run", *how)
    assert done.returncode == 0, done.stderr
    records = read_results(tmp_path / "run")
    expected = opal_deploy.load(edited_model, device="cpu", threads=1).predict(images)
    for record, other in zip(records, expected, strict=True):
        assert sorted(slot["slot"] for slot in record["evidence"]) == LEFT[record["prediction"]["label"]]
        assert [(slot["slot"], slot["box"]) for slot in record["evidence"]] == [
            (slot["slot"], slot["box"]) for slot in other["evidence"]
        ]
        assert record["prediction"]["cosine"] == pytest.approx(other["prediction"]["cosine"], abs=1e-6)
        total = sum(slot["contribution"] for slot in record["evidence"])
        assert total == pytest.approx(record["prediction"]["cosine"], abs=1e-6)
    done = opal("verify", tmp_path / "run", "--model", edited_model)
    assert (done.returncode, "4 of 4 records match" in done.stderr) == (0, True), done.stderr


@pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")
def test_an_engine_is_built_from_an_edited_file(edited_model, tmp_path, opal):
    arguments = ("--trt", "--builder", "tensorrt-rtx", "--target", "sm80", "--no-verify")
    done = opal("export", edited_model, *arguments, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (engine,) = tmp_path.glob("*.engine")
    assert "m = 3, 4 slots dropped" in opal("inspect", engine).stderr
