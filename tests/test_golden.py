"""Files that each version wrote open, verify, answer and resume in this one; tests/golden/make.py writes them."""

import json
import shutil
from pathlib import Path

import pytest

from opal_deploy.artifact.engine_file import check_engine
from tests.cli.calls import check, one_line, read_results
from tests.golden.make import TRAINING

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name != "__pycache__")
MODELS = (
    "model.pt", "model.onnx", "model.fp16.onnx", "model.int8.onnx", "model.bf16.onnx", "early.onnx", "pip.onnx",
    "proto.onnx",
)  # fmt: skip
CPU = ("--device", "cpu", "--threads", "1")


@pytest.fixture(params=VERSIONS)
def folder(request, tmp_path):
    """A copy of a version's files, in which commands may write."""
    shutil.copytree(GOLDEN / request.param, tmp_path / "golden")
    return tmp_path / "golden"


@pytest.fixture
def call(opal, folder):
    return lambda *arguments: opal(*arguments, cwd=folder)


def test_every_model_is_inspected(call, folder):
    for name in (*MODELS, "model.engine"):
        document = json.loads(check(call("inspect", name, "--json")).stdout)
        assert document.get("intact", True), name
    sidecar = check_engine(folder / "model.engine")
    assert (sidecar.metadata.known_baseline is not None, sidecar.onnx["file"]) == (True, "c.onnx")


def test_every_model_that_a_cpu_runs_reproduces_its_vectors_and_the_records_of_that_time(call):
    for name in MODELS:
        if name == "model.bf16.onnx":
            continue
        if name != "model.pt":
            check(call("verify", name, *CPU))
        done = json.loads(check(call("verify", f"{name}.jsonl", "--model", name, *CPU, "--all", "--json")).stdout)
        assert (done["records"], done["checked"]) == (3, 3), name


def test_a_graph_becomes_one_of_another_precision_with_other_inputs_and_outputs(call):
    options = ("--precision", "fp16", "--outputs", "topk", "--input", "image", "--threads", "1")
    check(call("export", "model.onnx", *options, "--out", "new.onnx"))
    check(call("verify", "new.onnx", *CPU))


def test_a_signed_run_is_verified_converted_and_compared(call):
    model = ("--model", "model.onnx", *CPU)
    done = check(call("verify", "run", *model, "--all", "--public-key", "public.pem", "--json"))
    assert json.loads(done.stdout)["signatures_valid"] == 3
    check(call("convert", "run", "--to", "coco"))
    check(call("diff", "run", "model.onnx.jsonl"))


def test_an_interrupted_run_goes_on_where_it_ended(call, folder):
    before = (folder / "unfinished/results.jsonl").read_bytes()
    check(call("infer", "images", "--model", "model.onnx", *CPU, "--no-isolate", "--out", "unfinished"))
    after = (folder / "unfinished/results.jsonl").read_bytes()
    assert (before.count(b"\n"), after.count(b"\n"), after[: len(before)]) == (2, 3, before)


def test_a_file_without_keys_that_came_later_answers_and_refuses_what_needs_them(call, folder):
    model = ("--model", "early.onnx", *CPU)
    check(call("infer", "images", *model, "--no-isolate", "--out", "out"))
    assert [record["status"] for record in read_results(folder / "out")] == ["ok"] * 3
    advice = "opal-deploy evaluate"
    assert advice in one_line(call("infer", "images", *model, "--out", "unknown", "--unknown", "5%"))
    assert advice in one_line(call("drift", "out", "--baseline", "early.onnx"))


def test_an_interrupted_training_goes_on(call, folder):
    before = (folder / "training/metrics.csv").read_text("utf-8").splitlines()
    check(call(*TRAINING, "--resume"))
    after = (folder / "training/metrics.csv").read_text("utf-8").splitlines()
    assert (after[: len(before)], len(after)) == (before, 4)
