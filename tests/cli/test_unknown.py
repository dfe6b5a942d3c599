"""`--unknown`: images unlike the training images get the status `unknown`, in every command and runtime alike."""

import json
import shutil
from dataclasses import replace

import httpx
import numpy as np
import onnx
import pytest
from PIL import Image

import opal_deploy
from opal_deploy.artifact import onnx_file
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.config import HeadConfig
from opal_deploy.synthetic import generate_dataset
from tests.browser import ORT_WEB, needs_ort_web
from tests.builders import build_random_network
from tests.cli.calls import check, one_line, read_results
from tests.server.test_process import serving

# with random weights, creatures are hardly less strange than noise
RATE = "50%"
CPU = ("--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def folder(opal, tmp_path_factory):
    """`model.pt` with neighbours and baseline by `evaluate --record`, `model.onnx`; `in`: creatures and noise."""
    folder = tmp_path_factory.mktemp("unknown")
    counts = {"train_per_class": 8, "val_per_class": 10, "test_per_class": 3}
    classes = generate_dataset(folder / "data", num_species=3, size=(64, 64), **counts)
    network = build_random_network(3, HeadConfig(prototypes_per_class=2), (64, 64), stride=8)
    save(folder / "model.pt", Checkpoint(network, classes))
    check(opal("evaluate", folder / "data", "--model", folder / "model.pt", "--split", "val", "--record", *CPU))
    check(opal("export", folder / "model.pt", "--threads", "1"))
    (folder / "in").mkdir()
    for path in (folder / "data/test").rglob("*.png"):
        shutil.copy(path, folder / "in" / f"{path.parent.name}-{path.name}")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "in/noise.png")
    return folder


@pytest.fixture(scope="module")
def infer(opal, folder):
    def run(out, *arguments, model="model.onnx"):
        return opal("infer", "in", "--model", model, *CPU, "--no-isolate", "--out", out, *arguments, cwd=folder)

    return run


@pytest.fixture(scope="module")
def records(infer, folder):
    check(infer("out", "--unknown", RATE, "--explain", "--format", "csv"))
    return read_results(folder / "out")


def unknown(records):
    return {record["image"].removeprefix("in/") for record in records if record["status"] == "unknown"}


def test_out_of_distribution_images_are_unknown_and_say_why(records, folder, opal):
    baseline = onnx_file.read_metadata(folder / "model.onnx").known_baseline
    limit = baseline.choose_threshold(0.5)
    assert "noise.png" in unknown(records)
    assert len(unknown(records)) <= 5
    for record in records:
        assert (record["status"] == "unknown") == (record["ood_score"] > limit) == ("reason" in record)
        if record["status"] == "unknown":
            assert record["reason"].startswith(f"OOD score {record['ood_score']:.2f}, threshold {limit:.2f}")
            assert record["prediction"]["label"]
    done = check(opal("verify", "out", "--model", "model.onnx", "--all", *CPU, cwd=folder))
    assert f"{len(records)} of {len(records)} records match the model" in done.stderr
    shutil.copy(folder / "out/results.jsonl", folder / "alone.jsonl")
    check(opal("verify", "alone.jsonl", "--model", "model.onnx", "--all", *CPU, cwd=folder), 4)
    check(opal("verify", "alone.jsonl", "--model", "model.onnx", "--unknown", limit, *CPU, cwd=folder))
    # summary, table and report say it
    assert json.loads((folder / "out/summary.json").read_text("utf-8"))["statuses"]["unknown"] == len(unknown(records))
    rows = (folder / "out/results.csv").read_text("utf-8")
    assert rows.count(",unknown,") == len(unknown(records))
    report = (folder / "out/report.html").read_text("utf-8")
    assert "Unknown: OOD score" in report


def test_the_graph_computes_what_the_checkpoint_does(folder, records):
    named = {record["image"]: record["ood_score"] for record in records}
    images = sorted((folder / "in").iterdir())
    explained = opal_deploy.load(folder / "model.pt", device="cpu", threads=1).predict(images)
    assert [record["ood_score"] for record in explained] == pytest.approx(list(named.values()), abs=1e-4)


def test_what_cannot_be_answered_is_refused_in_a_line(infer, folder, opal, exact_model, map_model):
    before = "exact.onnx: computes no OOD score"
    assert before in one_line(infer("x", "--unknown", "5%", model=exact_model))
    assert before in one_line(opal("serve", exact_model, "--unknown", "5%", "--port", "0"))
    assert "evidence map" in one_line(infer("x", "--unknown", "5%", model=map_model))
    for option, value in (("--unknown", "nan"), ("--unknown", "1e400"), ("--min-margin", "nan")):
        assert f"{option} '{value}': expected" in one_line(infer("x", option, value))
    path = folder / "bare.onnx"
    shutil.copy(folder / "model.onnx", path)
    onnx_file.rewrite_metadata(path, replace(onnx_file.read_metadata(path), baseline={}))
    assert "bare.onnx has no baseline of validation images" in one_line(infer("x", "--unknown", "5%", model=path.name))
    check(infer("bare", "--unknown", "0.5", model=path.name))
    few = one_line(infer("x", "--unknown", "1%"))
    assert "30 validation images are too few for that rate; give 3.3% or more" in few
    check(infer("least", "--unknown", "3.3%"))
    assert not (folder / "x").exists()


def test_other_forms_of_the_graph_keep_the_output(opal, infer, folder, records):
    out, name = "fp16", "fp16.onnx"
    options = ("--precision", "fp16", "--outputs", "topk", "--top-k", "2", "--no-verify", "--threads", "1")
    check(opal("export", folder / "model.onnx", *options, "--out", folder / name))
    assert "ood_score" in {value.name for value in onnx.load(folder / name).graph.output}
    check(infer(out, "--unknown", RATE, "--top", "2", model=name))
    found = read_results(folder / out)
    expected = [record["ood_score"] for record in records]
    assert [record["ood_score"] for record in found] == pytest.approx(expected, abs=1e-2)
    assert "noise.png" in unknown(found)
    check(opal("verify", out, "--model", name, "--all", *CPU, cwd=folder))
    # what needs more classes than the file lists
    assert "it lists 2 of 3 classes; give --top 2, or a file that lists more" in one_line(infer("x", model=name))
    refused = one_line(opal("evaluate", "data", "--model", name, cwd=folder))
    assert "fp16.onnx: outputs only the best 2 classes, and `evaluate` needs all" in refused
    assert "of the best 2 classes" in opal("inspect", name, cwd=folder).stdout


def test_a_file_without_the_output_holds_no_features(opal, folder):
    options = ("--out", folder / "without.onnx", "--no-ood-score", "--no-verify", "--threads", "1")
    check(opal("export", folder / "model.pt", *options))
    graph = onnx.load(folder / "without.onnx").graph
    assert [value.name for value in graph.output] == ["logits", "argmax", "scores"]
    assert not [each.name for each in graph.initializer if "neighbours" in each.name]


def test_explain_warns_and_serve_answers_unknown(opal, folder):
    stranger = folder / "in/noise.png"
    done = check(opal("explain", stranger, "--model", folder / "model.onnx", "--unknown", RATE, *CPU, cwd=folder))
    assert "(unknown): noise.evidence.png" in done.stderr
    with serving(folder / "model.onnx", *CPU, "--unknown", RATE) as (_, url):
        answer = httpx.post(f"{url}/explain", content=stranger.read_bytes()).json()
        outputs = httpx.get(f"{url}/v2/models/model").json()["outputs"]
        metrics = httpx.get(f"{url}/metrics").text
    assert (answer["status"], answer["reason"][:10]) == ("unknown", "OOD score ")
    assert {"name": "ood_score", "datatype": "FP32", "shape": [-1, 1]} in outputs
    assert 'status="unknown"' in metrics


def test_triton_gets_output_and_threshold(opal, folder, tmp_path):
    check(opal("export", folder / "model.onnx", "--triton", tmp_path, "--no-verify"))
    config = (tmp_path / "opal/config.pbtxt").read_text("utf-8")
    # N is its only dimension, and in Triton it has another one
    assert 'name: "ood_score" data_type: TYPE_FP32 dims: 1 reshape' in config
    assert 'key: "unknown"' in (tmp_path / "opal_explain/config.pbtxt").read_text("utf-8")


@needs_ort_web
def test_the_site_knows_the_threshold(opal, folder, tmp_path):
    options = ("--web", tmp_path / "site", "--ort-web", ORT_WEB, "--unknown", RATE, "--no-verify")
    check(opal("export", folder / "model.onnx", *options))
    limit = onnx_file.read_metadata(folder / "model.onnx").known_baseline.choose_threshold(0.5)
    (rule,) = json.loads((tmp_path / "site/model.json").read_text("utf-8"))["decision"]
    assert (rule["name"], rule["quantity"], rule["limit"]) == ("unknown", "ood_score", limit)
