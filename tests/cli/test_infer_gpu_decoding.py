"""`infer --decode gpu`: refused where there is none; the whole command with the real codec in the GPU's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("nvidia.nvimgcodec")

Opal = Callable[..., subprocess.CompletedProcess[str]]
# the codec on the CPU, and a session that says it is a GPU's
MAIN = """
import sys
sys.argv[0] = 'opal-deploy'
from opal_deploy.preprocess import gpu
gpu.open_gpu_decoders = lambda devices, cpu_threads, otherwise: (gpu.GpuDecoder('cpu', cpu_threads),)
from opal_deploy.cli import main
main()
"""


@pytest.fixture
def with_codec(tmp_path: Path) -> Opal:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", MAIN, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def jpegs(make_pictures: Callable, tmp_path: Path) -> Path:
    """A folder of six JPEG pictures."""
    for path in make_pictures(tmp_path / "in", 6):
        with Image.open(path) as image:
            image.convert("RGB").save(path.with_suffix(".jpg"), quality=95)
        path.unlink()
    return tmp_path / "in"


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]


def test_a_model_on_the_cpu_is_told_in_one_line(opal: Opal, exact_model: Path, jpegs: Path, tmp_path: Path) -> None:
    done = opal("infer", jpegs, "--model", exact_model, "--decode", "gpu", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "opal-deploy: there is no GPU to decode on: the model runs on the CPU; leave --decode out to decode on the CPU"
    ]
    assert not (tmp_path / "explanations").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_in_one_line(
    opal: Opal, exact_model: Path, jpegs: Path, tmp_path: Path
) -> None:
    done = opal("infer", "in", "--model", exact_model, "--decode", "gpu", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = (text for text in done.stderr.splitlines() if text.startswith("opal-deploy: "))
    assert "there is no decoding on cuda:0" in line
    assert "leave --decode out" in line


def test_records_overlays_and_a_resume(
    opal: Opal, with_codec: Opal, exact_model: Path, jpegs: Path, tmp_path: Path
) -> None:
    (jpegs / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    options = ["--model", exact_model, "--explain", "--threads", "1"]
    expected = opal("infer", "in", *options, "--out", "cpu", cwd=tmp_path)
    done = with_codec("infer", "in", *options, "--out", "gpu", "--decode", "gpu")
    assert (done.returncode, expected.returncode) == (3, 3), done.stderr
    ours, theirs = records(tmp_path / "gpu"), records(tmp_path / "cpu")
    assert [r["image"] for r in ours] == [r["image"] for r in theirs]
    assert [r["status"] for r in ours] == [r["status"] for r in theirs]
    # the codec's pixels are the same here, and the resize is within a count
    for mine, other in zip(ours, theirs, strict=True):
        if mine["status"] != "error":
            assert mine["prediction"]["class_id"] == other["prediction"]["class_id"]
            assert mine["margin"] == pytest.approx(other["margin"], abs=0.01)
    assert {p.name for p in (tmp_path / "gpu" / "overlays").iterdir()} == {
        p.name for p in (tmp_path / "cpu" / "overlays").iterdir()
    }
    assert json.loads((tmp_path / "gpu" / "run.json").read_text())["run"]["decode"] == "gpu"
    again = with_codec("infer", "in", *options, "--out", "gpu", "--decode", "gpu")
    assert again.returncode == 3
    checked = with_codec("verify", "gpu", "--model", exact_model, "--threads", "1")
    assert checked.returncode == 0, checked.stderr
    # where there is no GPU the records cannot be made again, and verify has no --decode to leave out
    refused = opal("verify", "gpu", "--model", exact_model, "--device", "cpu", cwd=tmp_path)
    assert refused.returncode == 2
    assert "those records were made with --decode gpu, and are checked where there is a GPU" in refused.stderr
    other = opal("infer", "in", *options, "--out", "gpu", cwd=tmp_path)
    assert other.returncode == 2
    assert "decode" in other.stderr


def test_bench_pipeline_takes_the_decode_path(with_codec: Opal, exact_model: Path, jpegs: Path) -> None:
    done = with_codec(
        "bench", "pipeline", jpegs, "--model", exact_model, "--decode", "gpu", "--no-isolate", "--batch", "2",
        "--repeats", "1", "--threads", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["case"]["decode"], line["case"]["isolate"]) == ("gpu", False)


def test_bench_decoding_compares_the_codec_too(with_codec: Opal, jpegs: Path) -> None:
    done = with_codec("bench", "decoding", jpegs, "--device", "cuda:0", "--json", "--size", "32")
    assert done.returncode == 0, done.stderr
    paths = {row["name"]: row for row in json.loads(done.stdout)["paths"]}
    assert list(paths) == ["default", "exact", "fast", "gpu (cpu)"]
    assert paths["gpu (cpu)"]["largest"] <= 1
    assert paths["gpu (cpu)"]["images"] == 6


@pytest.mark.parametrize("device", ["cuda:x", "cuda:-1", "cpu:0", "gpu"])
def test_a_device_that_is_none_is_a_line(opal: Opal, jpegs: Path, tmp_path: Path, device: str) -> None:
    done = opal("bench", "decoding", jpegs, "--device", device, cwd=tmp_path)
    assert done.returncode == 2
    assert f"device {device!r}: expected auto, cpu, cuda" in done.stderr
