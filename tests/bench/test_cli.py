"""`bench latency`, `throughput` and `compare` from the command line to the measurements that they write."""

import pytest

from opal_deploy.bench.measurement import Measurement, read_measurements
from tests.cli.calls import check, one_line

QUICK = ["--seconds", "0.05", "--warmup", "0", "--device", "cpu", "--threads", "1"]


@pytest.fixture
def bench(opal):
    """Runs a quick benchmark that succeeds; returns its measurements from stdout, and stderr."""

    def run(*arguments):
        done = check(opal("bench", *arguments, *QUICK, "--json"))
        return [Measurement.from_line(line) for line in done.stdout.splitlines()], done.stderr

    return run


def test_latency_of_two_models(bench, exact_model, linear_model, tmp_path):
    out = tmp_path / "new" / "latency.jsonl"
    models = ["--model", exact_model, "--model", linear_model]
    measurements, stderr = bench("latency", *models, "--batch", "1,2", "--repeats", "2", "--out", out)
    first = measurements[0]
    assert measurements == list(read_measurements([out]))
    assert [(m.target.name, m.case["batch"]) for m in measurements] == [
        ("exact.onnx", 1), ("exact.onnx", 2), ("none.onnx", 1), ("none.onnx", 2),
    ]  # fmt: skip
    names = {"p50_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms", "images_per_second", "peak_memory"}
    assert names <= set(first.figures)
    assert len(first.figures["images_per_second"].repeats) == 2
    assert str(tmp_path) not in out.read_text()
    assert first.command.startswith("opal-deploy bench latency --model exact.onnx --model none.onnx --batch 1,2")
    assert "none.onnx, batch 2, threads 1: p50" in stderr


def test_the_networks_own_classifier_is_timed(bench):
    options = "--backbone mobilenet_v3_small --head plain --size 32 --seconds 0.01 --repeats 1 --runtime eager"
    (measurement,), _ = bench("latency", *options.split())
    assert (measurement.target.name, measurement.target.head) == ("mobilenet_v3_small + plain", "plain")


def test_two_files_are_compared(bench, exact_model, linear_model):
    (measurement,), stderr = bench("compare", linear_model, exact_model, "--pairs", "4")
    assert measurement.case["reference"] == "none.onnx"
    assert len(measurement.figures["ratio"].repeats) == 4
    assert "question" not in stderr
    assert "exact.onnx, reference none.onnx, batch 1, threads 1: ratio" in stderr


def test_the_cost_of_the_head(bench, exact_model):
    model = ["--model", exact_model.with_suffix(".pt"), "--runtime", "eager"]
    (measurement,), _ = bench("compare", "--question", "head", *model, "--pairs", "3")
    assert measurement.case == {"question": "head", "reference": "linear", "batch": 1, "threads": 1}
    assert (measurement.target.head, measurement.details["reference"]["head"]) == ("opal", "linear")
    assert measurement.timed.count("scores") == 1
    assert measurement.details["reference_timed"].count("scores") == 0


@pytest.mark.parametrize(
    ("call", "usable", "unusable"),
    [
        (
            ["compare", "--question", "precision", "--runtime", "eager", "--pairs", "2"],
            [("torch eager", "fp16"), ("torch eager", "bf16")],
            ["tf32: not usable: CPUs have no precision tf32", "int8: not usable:"],
        ),
        (
            ["latency", "--runtime", "tensorrt", "--runtime", "eager", "--repeats", "1"],
            [("torch eager", "fp32")],
            ["exact.pt in tensorrt, fp32: not usable:"],
        ),
    ],
    ids=["precision", "runtime"],
)
def test_one_that_cannot_run_here_is_named_and_stops_no_other(bench, exact_model, call, usable, unusable):
    measurements, stderr = bench(*call, "--model", exact_model.with_suffix(".pt"))
    assert [(m.target.runtime, m.target.precision) for m in measurements] == usable
    assert all(text in stderr for text in unusable)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("latency", "nothing to time: give --model FILE or --backbone NAME"),
        ("throughput --model no.onnx", "no.onnx: no such model"),
        ("throughput --backbone resnet19", "backbone 'resnet19': torchvision has no such classifier"),
        ("throughput --backbone vgg11 --stride 3", "stride 3"),
        ("latency --model {model} --batch 0", "--batch '0': expected positive integers"),
        ("latency --model {model} --runtime caffe", "runtime 'caffe': expected one of eager"),
        ("latency --model {model} --precision fp8", "precision 'fp8': expected one of fp32"),
        ("compare {model}", "give two models, A and B, or --question"),
        ("compare --question head", "--question head needs --backbone NAME or --model"),
        ("compare --backbone resnet18", "need --question"),
        ("compare {model} --question head", "--question compares variants of --model and --backbone"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(opal, exact_model, call, message):
    assert message in one_line(opal("bench", *(word.format(model=exact_model) for word in call.split())))
