"""`opal-deploy bench roofline` as it is called."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from opal_deploy.bench.measurement import Figure, Measurement, Target, append_measurement, read_measurements
from opal_deploy.bench.roofline import measure
from opal_deploy.bench.roofline.ceiling import find_device
from opal_deploy.bench.roofline.work import count_backbone_work, count_head_work
from opal_deploy.cli import app
from opal_deploy.model.config import HeadConfig


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "roofline", *map(str, arguments)])


def _ceiling(path: Path) -> Path:
    subject = Target(name="cpu", device="cpu")
    figures = {"copy": Figure(10.0, "GB/s"), "matmul_fp32": Figure(0.5, "TFLOP/s")}
    append_measurement(path, Measurement("ceiling", subject, {"threads": 2}, figures, when="2026-01-02T03:04:05+00:00"))
    return path


class TestItsOutputs:
    def test_lines_hold_the_work_and_the_ceilings_of_backbone_head_and_both(self, tmp_path: Path) -> None:
        lines, chart = tmp_path / "roofline.jsonl", tmp_path / "roofline.svg"
        done = _run(
            "--backbone", "resnet18", "--classes", 10, "--prototypes", 3, "--size", "160x192", "--batch", 8,
            "--gpu", "l4", "--gpu", "NVIDIA H200", "--out", lines, "--chart", chart,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        found = {m.case["part"]: m for m in read_measurements([lines])}
        body = count_backbone_work("resnet18", (160, 192))
        head = count_head_work("resnet18", 10, HeadConfig(prototypes_per_class=3), (160, 192))
        for part, work in (("backbone", body), ("head", head), ("network", body + head)):
            figures = found[part].figures
            assert figures["macs"].value == work.macs
            assert figures["bytes_fp16"].value == work.bytes_moved(8, "fp16")
            assert figures["intensity"].value == pytest.approx(work.intensity(8, "fp16"))
            expected = find_device("l4").images_per_second(work, 8, "fp16")
            assert figures["ceiling L4 24 GB"].value == pytest.approx(expected)
            assert [ceiling["name"] for ceiling in found[part].details["ceilings"]] == ["L4 24 GB", "H200 141 GB SXM"]
            assert len(found[part].details["layers"]) == len(work.layers)
        texts = "".join(ElementTree.parse(chart).getroot().itertext())
        for expected_text in ("FLOPs per byte", "L4 24 GB", "resnet18", "its head (hollow)"):
            assert expected_text in texts
        assert "L4 24 GB: 121 TFLOP/s fp16, 300 GB/s (NVIDIA L4" in done.stdout

    def test_a_measured_ceiling_stands_alone_unless_gpus_are_asked_for(self, tmp_path: Path) -> None:
        path = _ceiling(tmp_path / "ceiling.jsonl")
        arguments = ("--backbone", "resnet18", "--precision", "fp32", "--ceiling", path, "--format", "markdown")
        done = _run(*arguments)
        assert done.exit_code == 0, done.output
        assert "FLOPs/byte | cpu, 2 threads |" in done.stdout
        assert "- cpu, 2 threads: 0.5 TFLOP/s fp32, 10 GB/s (measured: copy and product, 2026-01-02)" in done.stdout
        assert "| cpu, 2 threads | T4 16 GB |" in _run(*arguments, "--gpu", "t4").stdout

    def test_measures_first_and_writes_the_ceiling_down(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**16)
        monkeypatch.setitem(measure.MATRIX_SIZE, "cpu", 32)
        lines = tmp_path / "all.jsonl"
        done = _run(
            "--backbone", "resnet18", "--measure-ceiling", "--threads", 1, "--precision", "fp32", "--out", lines
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert [m.kind for m in read_measurements([lines])] == ["ceiling", "roofline", "roofline", "roofline"]
        assert "timed: copy: 0 MiB" in done.stderr
        assert "cpu, 1 thread" in done.stdout


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--gpu", "a100"), "--gpu 'a100': no figures for it"),
            (("--gpu", "t4", "--precision", "bf16"), "none of T4 16 GB has a figure for it"),
            (("--measure-ceiling", "--precision", "int8"), "torch has no such product"),
            (("--chart", "a.pdf"), "expected a name that ends in"),
            (("--backbone", "resnet17", "--gpu", "t4"), "torchvision has no such classifier"),
        ],
    )
    def test_are_one_line(self, arguments: tuple[str, ...], message: str) -> None:
        done = _run(*arguments)
        assert done.exit_code != 0
        assert message in f"{done.exception}"

    def test_a_file_without_a_ceiling(self, tmp_path: Path) -> None:
        path = tmp_path / "other.jsonl"
        append_measurement(path, Measurement("latency", None, {}, {}))
        assert "no measured ceiling in it" in f"{_run('--ceiling', path).exception}"
