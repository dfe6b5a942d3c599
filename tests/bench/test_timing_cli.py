"""`bench latency`, `throughput` and `compare` from the command line to the lines that they write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.bench.measurement import Measurement, read_measurements

QUICK = ["--seconds", "0.05", "--warmup", "0", "--device", "cpu", "--threads", "1"]

Opal = Callable[..., Any]


def lines(text: str) -> list[Measurement]:
    return [Measurement.from_line(line) for line in text.splitlines()]


def test_latency_of_two_models(opal: Opal, exact_model: Path, linear_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "latency.jsonl"
    models = ["--model", exact_model, "--model", linear_model]

    done = opal("bench", "latency", *models, "--batch", "1,2", "--repeats", "2", *QUICK, "--out", out, "--json")

    assert done.returncode == 0, done.stderr
    found = lines(done.stdout)
    assert found == list(read_measurements([out]))
    assert [(m.target.name, m.case["batch"]) for m in found if m.target] == [
        ("exact.onnx", 1), ("exact.onnx", 2), ("none.onnx", 1), ("none.onnx", 2),
    ]  # fmt: skip
    assert {"p50_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms", "images_per_second", "peak_memory"} <= set(
        found[0].figures
    )
    assert len(found[0].figures["images_per_second"].repeats) == 2
    assert str(tmp_path) not in done.stdout
    assert found[0].command.startswith("opal-deploy bench latency --model exact.onnx --model none.onnx --batch 1,2")
    assert "batch 2: p50" in done.stderr


def test_throughput_with_a_ceiling(opal: Opal, exact_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    ceiling = tmp_path / "ceiling.jsonl"
    ceiling.write_text(
        '{"schema": 1, "kind": "ceiling", "subject": {"name": "cpu", "device": "cpu"}, "case": {"threads": 1}, '
        '"figures": {"copy": {"value": 10, "unit": "GB/s"}, "matmul_fp32": {"value": 0.05, "unit": "TFLOP/s"}}}\n'
    )

    done = opal(
        "bench", "throughput", "--model", exact_model, "--batch", "2", *QUICK, "--ceiling", ceiling, "--out", out
    )

    assert done.returncode == 0, done.stderr
    row, offline = read_measurements([out])
    assert row.figures["share_of_ceiling"].value > 0
    assert row.details["ceiling"]["bound"] in ("compute", "memory")
    assert offline.case["scenario"] == "offline"
    assert "% of the ceiling" in done.stderr


def test_the_server_scenario(opal: Opal, linear_model: Path) -> None:
    arguments = ["--scenario", "server", "--limit-ms", "500", "--max-batch", "2", "--repeats", "1", "--json"]

    done = opal("bench", "latency", "--model", linear_model, *QUICK, *arguments)

    assert done.returncode == 0, done.stderr
    (found,) = lines(done.stdout)
    assert found.kind == "server"
    assert found.figures["p99_ms"].value <= 500


def test_two_files_in_turns(opal: Opal, exact_model: Path, linear_model: Path) -> None:
    done = opal("bench", "compare", linear_model, exact_model, "--pairs", "4", *QUICK, "--json")

    assert done.returncode == 0, done.stderr
    (found,) = lines(done.stdout)
    assert found.case["reference"] == "none.onnx"
    assert len(found.figures["ratio"].repeats) == 4
    assert "95 % interval" in done.stderr


def test_what_the_head_costs(opal: Opal, exact_model: Path) -> None:
    model = ["--model", exact_model.with_suffix(".pt")]

    done = opal(
        "bench", "compare", "--question", "head", *model, "--runtime", "eager", "--pairs", "3", *QUICK, "--json"
    )

    assert done.returncode == 0, done.stderr
    (found,) = lines(done.stdout)
    assert found.case == {"question": "head", "reference": "linear", "batch": 1, "threads": 1}
    assert found.target is not None
    assert (found.target.head, found.details["reference"]["head"]) == ("opal", "linear")
    assert found.timed.count("scores") == 1
    assert found.details["reference_timed"].count("scores") == 0


def test_precisions_that_cannot_run_here_are_named(opal: Opal, exact_model: Path) -> None:
    model = ["--model", exact_model.with_suffix(".pt")]

    done = opal(
        "bench", "compare", "--question", "precision", *model, "--runtime", "eager", "--pairs", "2", *QUICK, "--json"
    )

    assert done.returncode == 0, done.stderr
    assert [m.target.precision for m in lines(done.stdout) if m.target] == ["fp16", "bf16"]
    assert "tf32: not usable: precision tf32: CPUs have none" in done.stderr
    assert "int8: not usable:" in done.stderr


def test_one_runtime_that_cannot_run_stops_no_other(opal: Opal, exact_model: Path) -> None:
    arguments = ["--runtime", "tensorrt", "--runtime", "eager", "--repeats", "1", "--json"]

    done = opal("bench", "latency", "--model", exact_model.with_suffix(".pt"), *QUICK, *arguments)

    assert done.returncode == 0, done.stderr
    assert [m.target.runtime for m in lines(done.stdout) if m.target] == ["torch eager"]
    assert "exact.pt in tensorrt, fp32: not usable:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency"], "nothing to time: give --model FILE or --backbone NAME"),
        (["throughput", "--model", "no.onnx"], "no.onnx: no such model"),
        (["throughput", "--backbone", "resnet19"], "backbone 'resnet19': torchvision has no such classifier"),
        (["latency", "--model", "{model}", "--batch", "0"], "--batch '0': expected whole numbers from 1"),
        (["latency", "--model", "{model}", "--runtime", "caffe"], "--runtime 'caffe': expected one of eager"),
        (["latency", "--model", "{model}", "--precision", "fp8"], "--precision 'fp8': expected one of fp32"),
        (["latency", "--model", "{model}", "--scenario", "server"], "--scenario server and --limit-ms"),
        (["latency", "--model", "{model}", "--limit-ms", "3"], "--scenario server and --limit-ms"),
        (["latency", "--model", "{model}", "--scenario", "server", "--limit-ms", "0"], "expected milliseconds above 0"),
        (["latency", "--model", "{model}", "--scenario", "single-stream", "--batch", "1"], "leave --batch out"),
        (["compare", "{model}"], "give two models, A and B, or --question"),
        (["compare", "--question", "head"], "--question head: of what?"),
        (["compare", "--backbone", "resnet18"], "are for --question"),
        (["compare", "{model}", "--question", "head"], "--question takes --model and --backbone"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    exact_model: Path,
    arguments: list[str],
    message: str,
) -> None:
    from opal_deploy.cli import main

    filled = ["bench", *(text.format(model=exact_model) for text in arguments)]
    monkeypatch.setattr("sys.argv", ["opal-deploy", *filled])
    with pytest.raises(SystemExit) as stopped:
        main()

    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
