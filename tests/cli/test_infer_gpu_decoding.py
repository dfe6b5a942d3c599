"""`infer --decode gpu`: refused where there is none; the whole command with the real codec in the GPU's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from opal_deploy.preprocess import gpu
from tests.cli.calls import Opal, read_results

pytest.importorskip("nvidia.nvimgcodec")


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec on the CPU, where a GPU's would be."""
    monkeypatch.setattr(gpu, "open_gpu_decoders", lambda devices, threads, otherwise: (gpu.GpuDecoder("cpu", threads),))


@pytest.fixture
def jpegs(make_pictures: Callable, tmp_path: Path) -> Path:
    """A folder of six JPEG pictures."""
    for path in make_pictures(tmp_path / "in", 6):
        with Image.open(path) as image:
            image.convert("RGB").save(path.with_suffix(".jpg"), quality=95)
        path.unlink()
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["infer", "in", "--model", "exact.onnx", "--decode", "gpu", "--device", "cpu"],
                     "there is no GPU to decode on: the model runs on the CPU; leave --decode out to decode on the CPU",
                     id="a model on the CPU"),
        pytest.param(["infer", "in", "--model", "exact.onnx", "--decode", "gpu"], "there is no decoding on cuda:0",
                     id="no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
        *(pytest.param(["bench", "decoding", "in", "--device", device], f"device {device!r}: expected auto, cpu, cuda",
                       id=device) for device in ("cuda:-1", "cpu:0", "gpu")),
    ],
)  # fmt: skip
def test_a_device_that_decodes_nothing_is_refused_in_one_line(
    opal: Opal, exact_model: Path, jpegs: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "exact.onnx").symlink_to(exact_model)
    done = opal(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = (text for text in done.stderr.splitlines() if text.startswith("opal-deploy: "))
    assert message in line
    assert not (tmp_path / "explanations").exists()


def test_records_overlays_and_a_resume(
    opal: Opal, codec: None, exact_model: Path, jpegs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (jpegs / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    options = ["in", "--model", exact_model, "--explain", "--threads", "1"]
    assert opal("infer", *options, "--out", "cpu", cwd=tmp_path).returncode == 3
    for _ in range(2):
        done = opal("infer", *options, "--out", "gpu", "--decode", "gpu", cwd=tmp_path)
        assert done.returncode == 3, done.stderr
    ours, theirs = read_results(tmp_path / "gpu"), read_results(tmp_path / "cpu")
    # the codec's pixels are the same here, and the resize is within a count
    for mine, other in zip(ours, theirs, strict=True):
        assert all(mine.get(key) == other.get(key) for key in ("image", "status", "overlay"))
        if mine["status"] != "error":
            assert mine["prediction"]["class_id"] == other["prediction"]["class_id"]
            assert mine["margin"] == pytest.approx(other["margin"], abs=0.01)
            assert (tmp_path / "gpu" / mine["overlay"]).is_file()
    assert json.loads((tmp_path / "gpu" / "run.json").read_text())["run"]["decode"] == "gpu"
    checked = opal("verify", "gpu", "--model", exact_model, "--threads", "1", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    # where there is no GPU the records cannot be made again, and verify has no --decode to leave out
    monkeypatch.undo()
    refused = opal("verify", "gpu", "--model", exact_model, "--device", "cpu", cwd=tmp_path)
    assert refused.returncode == 2
    assert "those records were made with --decode gpu, and are checked where there is a GPU" in refused.stderr
    other = opal("infer", *options, "--out", "gpu", cwd=tmp_path)
    assert other.returncode == 2
    assert "--decode gpu there" in other.stderr


def test_both_benchmarks_measure_the_codec_too(opal: Opal, codec: None, exact_model: Path, jpegs: Path) -> None:
    done = opal(
        "bench", "pipeline", jpegs, "--model", exact_model, "--decode", "gpu", "--no-isolate", "--batch", "2",
        "--repeats", "1", "--threads", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    case = json.loads(done.stdout.splitlines()[-1])["case"]
    assert (case["decode"], case["isolate"]) == ("gpu", False)

    done = opal("bench", "decoding", jpegs, "--device", "cuda:0", "--json", "--size", "32")
    assert done.returncode == 0, done.stderr
    paths = {row["name"]: row for row in json.loads(done.stdout)["paths"]}
    assert list(paths) == ["default", "exact", "fast", "gpu (cpu)"]
    assert paths["gpu (cpu)"]["largest"] <= 1
    assert paths["gpu (cpu)"]["images"] == 6
