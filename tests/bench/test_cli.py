"""`bench latency`, `throughput` and `compare` from the command line to the measurements that they write."""

import json

import pytest

from tests.cli.calls import check, one_line

QUICK = ["--seconds", "0.05", "--warmup", "0", "--device", "cpu", "--threads", "1"]


@pytest.fixture
def bench(opal):
    """Runs a quick benchmark that succeeds; returns its measurements from stdout, and stderr."""

    def run(*arguments):
        done = check(opal("bench", *arguments, *QUICK, "--json"))
        return list(map(json.loads, done.stdout.splitlines())), done.stderr

    return run


def test_latency_of_two_models(bench, exact_model, linear_model, tmp_path):
    out = tmp_path / "new" / "latency.jsonl"
    models = ["--model", exact_model, "--model", linear_model]
    measurements, stderr = bench("latency", *models, "--batch", "1,2", "--repeats", "2", "--out", out)
    first = measurements[0]
    assert measurements == list(map(json.loads, out.read_text().splitlines()))
    assert [(m["target"]["name"], m["case"]["batch"]) for m in measurements] == [
        ("exact.onnx", 1), ("exact.onnx", 2), ("none.onnx", 1), ("none.onnx", 2),
    ]  # fmt: skip
    names = {"p50_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms", "images_per_second"}
    assert names <= first["figures"].keys()
    assert len(first["figures"]["images_per_second"]["repeats"]) == 2
    assert str(tmp_path) not in out.read_text()
    assert first["command"].startswith("opal-deploy bench latency --model exact.onnx --model none.onnx --batch 1,2")
    (row,) = (line for line in stderr.splitlines() if line.strip().startswith("p50_ms"))
    assert row.count("spread") == 4


def test_two_files_are_compared_and_one_is_refused(bench, opal, exact_model, linear_model):
    (measurement,), stderr = bench("compare", linear_model, exact_model, "--repeats", "4")
    assert measurement["case"]["reference"] == "none.onnx, onnxruntime, fp32"
    assert (measurement["target"]["head"], measurement["details"]["reference"]["head"]) == ("opal", "linear")
    assert len(measurement["figures"]["ratio"]["repeats"]) == 4
    assert "exact.onnx" in stderr
    assert "give two models" in check(opal("bench", "compare", exact_model, "--device", "cpu"), 2).stderr


def test_one_that_cannot_run_here_is_named_and_stops_no_other(bench, exact_model):
    options = ["--runtime", "tensorrt", "--runtime", "eager", "--precision", "fp32", "--precision", "tf32"]
    measurements, stderr = bench("latency", *options, "--repeats", "1", "--model", exact_model.with_suffix(".pt"))
    assert [(m["target"]["runtime"], m["target"]["precision"]) for m in measurements] == [("torch eager", "fp32")]
    assert "exact.pt in tensorrt, fp32: not usable:" in stderr
    assert "exact.pt in eager, tf32: not usable: CPUs have no precision tf32" in stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("latency", "nothing to time: give --model FILE or --backbone NAME"),
        ("throughput --model no.onnx", "no.onnx: no such model"),
        ("throughput --backbone resnet19", "backbone 'resnet19': torchvision has no such classifier"),
        ("latency --model {model} --batch 0", "--batch '0': expected positive integers"),
        ("latency --model {model} --runtime caffe", "runtime 'caffe': expected one of eager"),
        ("compare", "nothing to time"),
        ("overhead --check --stride 16", "--check compares the paper's own table"),
        ("overhead --size 1x2x3", "--size '1x2x3': expected a number of pixels"),
        ("overhead --backbone resnet18 --size 100", "multiples"),
        ("pipeline {model}.no --model {model}", "no.onnx.no"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(opal, exact_model, call, message):
    if "{model}.no" in call:
        message = f"{exact_model}.no"
    assert message in one_line(opal("bench", *(word.format(model=exact_model) for word in call.split())))
