"""`opal-deploy export`: files, JSON and exit codes."""

import json
import shutil

import pytest

import opal_deploy
from opal_deploy import export_model, export_triton
from tests.cli.calls import check, one_line
from tests.export.conftest import needs_rtx

SMALL = ("--batch", "1:2:4", "--threads", "1")


@pytest.fixture
def folder(exact_model, tmp_path):
    """A folder with `c.onnx`."""
    shutil.copy(exact_model, tmp_path / "c.onnx")
    return tmp_path


def test_a_file_lands_beside_its_source_with_a_report_and_json(opal, folder):
    done = check(opal("export", "c.onnx", "--precision", "fp16", "--json", "--threads", "1", cwd=folder))
    document = json.loads(done.stdout)
    assert document["path"] == "c.fp16.onnx"
    assert document["verification"]["passed"] is True
    assert "generated creatures: largest differences: logit" in done.stderr
    assert {path.name for path in folder.iterdir()} == {"c.fp16.onnx", "c.onnx"}


def test_the_function_exports_what_the_command_exports_and_prints_nothing(exact_model, tmp_path, capsys):
    lines = []
    checkpoint, out = exact_model.with_suffix(".pt"), tmp_path / "c.onnx"
    result = export_model(str(checkpoint), out=out, threads=1, log=lines.append)
    assert result.path == out
    # the fixture's file was exported by the exporter itself
    assert out.read_bytes() == exact_model.read_bytes()
    assert result.onnx[0].comparison
    assert result.onnx[0].to_dict()["verification"]["passed"]
    assert export_model(checkpoint, out=out, threads=1).onnx[0].kept
    assert export_triton(out, tmp_path / "models", threads=1, log=lines.append).models == ("opal", "opal_explain")
    assert opal_deploy.load(result.path).sha256 == opal_deploy.load(exact_model).sha256
    assert lines[0].startswith("Tracing timm:test_resnet")
    for wrong in ({"precision": "fp64"}, {"outputs": "all"}, {"outputs": "topk", "top_k": 99}):
        with pytest.raises(opal_deploy.UsageError, match=r"expected (one of|at least)"):
            export_model(checkpoint, out=tmp_path / "other.onnx", **wrong)
    assert capsys.readouterr() == ("", "")


def test_no_verify_is_on_record_and_infer_repeats_it(opal, folder, make_pictures):
    exported = opal("export", "c.onnx", "--precision", "fp16", "--no-verify", cwd=folder)
    assert "NOT VERIFIED: exported with --no-verify" in exported.stderr
    make_pictures(folder / "in", 1)
    inferred = check(opal("infer", "in", "--model", "c.fp16.onnx", "--no-isolate", cwd=folder))
    assert "NOT VERIFIED: this model was exported with --no-verify" in inferred.stderr
    assert "NO: exported with --no-verify" in opal("inspect", "c.fp16.onnx", cwd=folder).stdout


def test_the_same_file_is_kept_and_another_is_replaced_only_when_told(opal, opal_process, folder):
    call = ("export", "c.onnx", "--precision", "fp16", "--no-verify", "--out", "out.onnx")
    assert "Wrote out.onnx" in opal(*call, cwd=folder).stderr
    first = (folder / "out.onnx").read_bytes()
    assert "Kept out.onnx" in opal(*call, cwd=folder).stderr
    # not verified, and of another format
    for arguments in (call[:4] + call[5:], ("export", "c.onnx", "--precision", "bf16", *call[4:])):
        refused = one_line(opal(*arguments, cwd=folder))
        assert "out.onnx: the file exists, of " in refused
        assert "exported with other" in refused
    assert (folder / "out.onnx").read_bytes() == first
    # done again in another process, the bytes are the same
    assert "Wrote" in opal_process(*call, "--overwrite", cwd=folder).stderr
    assert (folder / "out.onnx").read_bytes() == first
    (folder / "out.onnx").write_bytes(b"foreign")
    assert "not an exported file" in one_line(opal(*call, cwd=folder))
    assert (folder / "out.onnx").read_bytes() == b"foreign"


# ---- engines


@needs_rtx
def test_export_trt_then_infer_explain(opal, exact_model, make_pictures, tmp_path):
    # the two commands that everybody types first, exactly as written
    shutil.copy(exact_model.with_suffix(".pt"), tmp_path / "ckpt.pt")
    make_pictures(tmp_path / "images", 3)
    exported = check(opal("export", "ckpt.pt", "--trt", cwd=tmp_path))
    for text in ("Wrote ckpt.onnx", "Wrote ckpt.fp16.onnx", "Building for sm80 with TensorRT for RTX",
                 "unverified: never run on hardware"):  # fmt: skip
        assert text in exported.stderr
    assert exported.stderr.splitlines()[-1] == "Next: opal-deploy infer images/ --explain"
    inferred = check(opal("infer", "images/", "--explain", cwd=tmp_path))
    assert "not ckpt.fp16.sm80.rtx.engine (" in inferred.stderr
    assert "3 images in" in inferred.stderr
    assert (tmp_path / "explanations" / "report.html").is_file()


@needs_rtx
def test_an_onnx_file_needs_no_torch_and_the_document_names_engines_that_are_kept_the_next_time(opal, folder):
    call = ("export", "c.onnx", "--trt", "--target", "a100", "--target", "l4", "--json", *SMALL)
    done = check(opal(*call, cwd=folder, blocked=("torch", "torchvision")))
    document = json.loads(done.stdout)
    assert [file["path"] for file in document["files"]] == ["c.fp16.onnx"]
    assert [engine["target"]["sm"] for engine in document["engines"]] == ["sm80", "sm89"]
    assert {engine["state"]["state"] for engine in document["engines"]} == {"unverified"}
    assert "Kept c.fp16.sm80.rtx.engine" in opal(*call, cwd=folder).stderr
    refused = one_line(opal(*call, "--batch", "1:1:1", cwd=folder))
    assert "c.fp16.sm80.rtx.engine: exists, from another graph, builder, GPU or options" in refused
