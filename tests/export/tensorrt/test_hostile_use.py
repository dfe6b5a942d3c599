"""What a hostile user tried: interrupts, doubtful sources, links, folders in the way, options that cannot apply."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import Sidecar, check_engine, read_sidecar, sidecar_path, write_sidecar
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.candidate import ExportOptions, choose_images
from opal_deploy.export.checkpoint_export import export_checkpoint
from opal_deploy.export.onnx_export import export_onnx
from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, installed_version

pytestmark = pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")

SMALL = ("--batch", "1:2:4", "--threads", "1")


@pytest.fixture(scope="module")
def originals(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`c.onnx`, its fp16 file, and an engine of that."""
    folder = tmp_path_factory.mktemp("originals")
    out = folder / "c.onnx"
    export_checkpoint(make_checkpoint(seed=8), out, ExportOptions(out=out, threads=2))
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    shutil.copy(originals / "c.onnx", tmp_path / "c.onnx")
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_ctrl_c_while_the_builder_runs_exits_with_130_and_leaves_nothing(folder: Path) -> None:
    # the signal comes from the builder's own thread of events, at a moment when native code is running
    program = (
        "import os, signal, sys\n"
        "from opal_deploy.export.tensorrt import build\n"
        "make = build._monitor\n"
        "def interrupting(trt, advance):\n"
        "    monitor = make(trt, advance)\n"
        "    def start(phase, parent, steps):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    monitor.phase_start = start\n"
        "    return monitor\n"
        "build._monitor = interrupting\n"
        "sys.argv = ['opal-deploy', 'export', 'c.onnx', '--trt', '--batch', '1:2:4', '--threads', '1']\n"
        "from opal_deploy.cli import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr
    assert names(folder) == ["c.onnx"]


def test_the_interrupt_handler_is_put_back(folder: Path, opal: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    from opal_deploy.export.tensorrt.builder import _interrupting

    class Monitor:
        interrupted = False

    with _interrupting(Monitor()):
        assert signal.getsignal(signal.SIGINT) is not before
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_made_from_an_unverified_file_says_so(folder: Path, make_checkpoint: Any, opal: Any) -> None:
    out = folder / "c.onnx"
    export_checkpoint(make_checkpoint(seed=8), out, ExportOptions(out=out, threads=2, verify=False))
    done = opal("export", "c.onnx", "--trt", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stderr
    doubt = "made from c.onnx, which was exported with --no-verify"
    assert f"NOT VERIFIED: {doubt}" in done.stderr
    assert onnx_file.read_metadata(folder / "c.fp16.onnx").unverified == doubt
    assert check_engine(folder / "c.fp16.sm80.rtx.engine").metadata.unverified == doubt


@pytest.mark.data
@pytest.mark.parametrize("way", ["a link", "relative"])
def test_the_calibration_pictures_do_not_judge_by_another_name(
    folder: Path, photographs: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "link").symlink_to(photographs)
    monkeypatch.chdir(photographs)
    other = folder / "link" if way == "a link" else Path()
    options = ExportOptions(precision="int8", calibrate=photographs, pictures=other)
    judges, calibration = choose_images(options, onnx_file.read_metadata(folder / "c.onnx"))
    assert calibration is not None
    used = {Path(name).resolve() for name in calibration.names}
    assert not used & {Path(name).resolve() for name in judges.names}


def test_files_that_are_being_written_are_no_models(folder: Path, make_pictures: Any, opal: Any) -> None:
    shutil.copy(folder / "c.onnx", folder / ".a.onnx.x1.part.onnx")
    (folder / ".b.engine").write_bytes(b"half")
    make_pictures(folder / "in", 1)
    done = opal("infer", "in", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("Model: c.onnx ")


def test_a_kept_engines_sidecar_follows_the_onnx_file(folder: Path, opal: Any, make_pictures: Any) -> None:
    make_pictures(folder / "pictures", 12)
    assert opal("export", "c.onnx", "--trt", *SMALL, cwd=folder).returncode == 0
    engine = folder / "c.fp16.sm80.rtx.engine"
    before = engine.read_bytes()
    done = opal("export", "c.onnx", "--trt", "--pictures", "pictures", *SMALL, cwd=folder)
    assert "Kept c.fp16.sm80.rtx.engine" in done.stderr
    assert engine.read_bytes() == before
    sidecar, half = check_engine(engine), onnx_file.read_metadata(folder / "c.fp16.onnx")
    assert sidecar.onnx["sha256"] == half.file_sha256
    assert sidecar.metadata.verification["pictures"] == "12 photographs of pictures"


def test_a_folder_in_the_engines_place_is_one_line_and_leaves_nothing(folder: Path, opal: Any) -> None:
    (folder / "c.fp16.sm80.rtx.engine").mkdir()
    done = opal("export", "c.onnx", "--trt", *SMALL, cwd=folder)
    assert done.returncode == 2
    assert "a folder of that name is there" in done.stderr.splitlines()[-1]
    assert names(folder) == ["c.fp16.sm80.rtx.engine", "c.onnx"]


def test_a_new_folder_for_a_file_that_fails_is_taken_back(folder: Path, opal: Any) -> None:
    done = opal("export", "c.onnx", "--trt", "--out", "new/deep", "--workspace", "1M", *SMALL, cwd=folder)
    if done.returncode == 0:
        pytest.skip("a megabyte was enough")
    assert names(folder) == ["c.onnx"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--precision", "fp32", "--outputs", "attention"], "inputs and outputs are fixed in an ONNX file"),
        (["--precision", "fp32", "--input", "float32"], "inputs and outputs are fixed in an ONNX file"),
        (["--precision", "fp32", "--pictures", "nowhere"], "nothing to verify or calibrate on pictures"),
        (["--target", "sm70"], "runs on sm75 and newer"),
        (["--timing-cache", "."], "--timing-cache"),
        (["--workspace", "99999999999G"], "expected between 1M and 1024G"),
    ],
)
def test_options_that_cannot_apply_are_refused(folder: Path, opal: Any, arguments: list[str], line: str) -> None:
    done = opal("export", "c.onnx", "--trt", *arguments, *SMALL, cwd=folder)
    assert done.returncode == 2
    assert line in done.stderr.splitlines()[-1]
    assert names(folder) == ["c.onnx"]


def test_level_zero_needs_trt_too(folder: Path, opal: Any) -> None:
    done = opal("export", "c.onnx", "--precision", "fp16", "--optimization-level", "0", cwd=folder)
    assert done.returncode == 2
    assert "--optimization-level: about engines; add --trt" in done.stderr


def test_a_file_of_lower_precision_does_not_become_fp32_again(folder: Path) -> None:
    half = export_onnx(folder / "c.onnx", ExportOptions(precision="fp16", threads=2)).path
    with pytest.raises(UsageError, match="it is fp16, and what was rounded away is lost"):
        export_onnx(half, ExportOptions(precision="fp32", threads=2))


def test_a_checkpoint_that_is_named_like_a_precision_is_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its name ends like a precision"):
        export_checkpoint(make_checkpoint(seed=8), tmp_path / "c.fp16.pt", ExportOptions(threads=2))


@pytest.mark.parametrize(
    "change",
    [{"built": {}}, {"state": {"state": "verified"}}, {"onnx": {"file": "c.onnx"}}, {"target": []}, {"engine": None},
     {"options": {"batch": "abc"}}, {"options": {"batch": [1, 2]}}, {"options": {"batch": [0, 1, 2]}}],
    ids=str,
)  # fmt: skip
def test_a_sidecar_with_parts_missing_is_one_line(folder: Path, opal: Any, change: dict[str, Any]) -> None:
    engine = folder / "c.engine"
    engine.write_bytes(b"a plan")
    metadata = onnx_file.read_metadata(folder / "c.onnx")
    whole = Sidecar(
        {"file": "c.engine", "sha256": "0" * 64, "bytes": 6}, {"name": "tensorrt", "version": "11"}, {"sm": "sm80"},
        {"batch": [1, 2, 4]}, {"file": "c.onnx", "sha256": "0" * 64}, "", {"when": "", "seconds": 1, "opal_deploy": ""},
        {"state": "unverified"}, metadata,
    )  # fmt: skip
    write_sidecar(engine, replace(whole, **change))
    assert json.loads(sidecar_path(engine).read_text())["schema"] == 1
    with pytest.raises(ArtifactError, match="of wrong type or missing"):
        read_sidecar(engine)


@pytest.mark.parametrize("model", ["nope.engine", "."])
def test_a_pin_for_a_file_that_is_not_there_is_one_line(opal: Any, tmp_path: Path, model: str) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    done = opal("infer", "a.png", "--model", model, "--expect-sha256", "00", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
