"""`opal-deploy bench roofline` as it is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest

from opal_deploy.bench.measurement import Figure, Measurement, Target, append_measurement, read_measurements
from opal_deploy.bench.roofline import measure
from opal_deploy.bench.roofline.ceiling import find_device
from opal_deploy.bench.roofline.work import count_backbone_work, count_head_work
from opal_deploy.model.config import HeadConfig

Opal = Callable[..., "CompletedProcess[str]"]


def test_lines_hold_work_and_ceilings_of_backbone_head_and_both(opal: Opal, tmp_path: Path) -> None:
    lines, chart = tmp_path / "roofline.jsonl", tmp_path / "roofline.svg"
    case = "--backbone resnet18 --classes 10 --prototypes 3 --size 160x192 --batch 8 --gpu l4"
    done = opal("bench", "roofline", *case.split(), "--gpu", "NVIDIA H200", "--out", lines, "--chart", chart)
    assert done.returncode == 0, done.stderr
    by_part = {m.case["part"]: m for m in read_measurements([lines])}
    body = count_backbone_work("resnet18", (160, 192))
    head = count_head_work("resnet18", 10, HeadConfig(prototypes_per_class=3), (160, 192))
    for part, work in (("backbone", body), ("head", head), ("network", body + head)):
        figures, details = by_part[part].figures, by_part[part].details
        assert figures["macs"].value == work.macs
        assert figures["bytes_fp16"].value == work.bytes_moved(8, "fp16")
        assert figures["intensity"].value == pytest.approx(work.intensity(8, "fp16"))
        assert figures["ceiling L4 24 GB"].value == pytest.approx(find_device("l4").images_per_second(work, 8, "fp16"))
        assert [ceiling["name"] for ceiling in details["ceilings"]] == ["L4 24 GB", "H200 141 GB SXM"]
        assert len(details["layers"]) == len(work.layers)
    texts = "".join(ElementTree.parse(chart).getroot().itertext())
    for text in ("FLOPs per byte", "L4 24 GB", "resnet18", "its head (hollow)"):
        assert text in texts
    assert "L4 24 GB: 121 TFLOP/s fp16, 300 GB/s (NVIDIA L4" in done.stdout


def test_a_measured_ceiling_stands_alone_unless_gpus_are_named(opal: Opal, tmp_path: Path) -> None:
    path = tmp_path / "ceiling.jsonl"
    target = Target(name="cpu", device="cpu")
    figures = {"copy": Figure(10.0, "GB/s"), "matmul_fp32": Figure(0.5, "TFLOP/s")}
    append_measurement(path, Measurement("ceiling", target, {"threads": 2}, figures, when="2026-01-02T03:04:05+00:00"))
    arguments = (
        "bench", "roofline", "--backbone", "resnet18", "--precision", "fp32", "--ceiling", path, "--format", "markdown"
    )  # fmt: skip
    done = opal(*arguments)
    assert done.returncode == 0, done.stderr
    assert "FLOPs/byte | cpu, 2 threads |" in done.stdout
    assert "- cpu, 2 threads: 0.5 TFLOP/s fp32, 10 GB/s (measured: copy and product, 2026-01-02)" in done.stdout
    assert "| cpu, 2 threads | T4 16 GB |" in opal(*arguments, "--gpu", "t4").stdout


def test_a_ceiling_is_measured_first_and_written_down(
    opal: Opal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(measure.MATRIX_SIZE, "cpu", 32)
    lines = tmp_path / "all.jsonl"
    arguments = "bench roofline --backbone resnet18 --measure-ceiling --threads 1 --precision fp32 --out"
    done = opal(*arguments.split(), lines)
    assert done.returncode == 0, done.stderr
    assert [m.kind for m in read_measurements([lines])] == ["ceiling", "roofline", "roofline", "roofline"]
    assert "timed: copy: 0 MiB" in done.stderr
    assert "cpu, 1 thread" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu a100", "--gpu 'a100': no figures for it"),
        ("--gpu t4 --precision bf16", "none of T4 16 GB has a figure for it"),
        ("--measure-ceiling --precision int8", "torch has no such product"),
        ("--chart a.pdf", "expected a name that ends in"),
        ("--backbone resnet17 --gpu t4", "torchvision has no such classifier"),
        ("--ceiling other.jsonl", "no measured ceiling in it"),
    ],
)
def test_wrong_calls_are_one_line(opal: Opal, arguments: str, message: str, tmp_path: Path) -> None:
    append_measurement(tmp_path / "other.jsonl", Measurement("latency", None, {}, {}))
    done = opal("bench", "roofline", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
