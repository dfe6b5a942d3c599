"""`export --trt` from one of our files: names, sidecars, an engine that is there already, and what failures leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import BatchRange, check_engine, sidecar_path
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.errors import ArtifactError, UsageError, VerificationError
from opal_deploy.export.candidate import ExportOptions
from opal_deploy.export.checkpoint_export import export_checkpoint
from opal_deploy.export.tensorrt import engine_export, from_checkpoint
from opal_deploy.export.tensorrt.builder import Network
from opal_deploy.export.tensorrt.engine_export import EngineJob
from opal_deploy.export.tensorrt.from_checkpoint import deploy_checkpoint
from opal_deploy.export.tensorrt.from_onnx import Deployment, deploy_onnx
from opal_deploy.export.tensorrt.options import BuildOptions, choose
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.nvml import Driver
from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, installed_version

pytestmark = pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")

NO_GPU = Driver(problem="no NVIDIA driver found")
SMALL = BuildOptions(batch=BatchRange(1, 2, 4))


@pytest.fixture(scope="module")
def fp32(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fp32") / "c.onnx"
    checkpoint: Checkpoint = make_checkpoint(seed=8)
    return export_checkpoint(checkpoint, out, ExportOptions(out=out, threads=2)).path


@pytest.fixture
def source(fp32: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(fp32, tmp_path / "ckpt.onnx"))


def job(*targets: str, **changes: Any) -> EngineJob:
    built = EngineJob(choose("tensorrt-rtx", targets, NO_GPU), SMALL)
    return replace(built, **changes)


def deploy(source: Path, precision: Any = "fp16", work: EngineJob | None = None, **options: Any) -> Deployment:
    wanted = ExportOptions(precision=precision, threads=2, **options)
    return deploy_onnx(source, wanted, source.parent, work or job(), NO_GPU)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestFiles:
    def test_they_are_named_by_model_precision_gpu_and_builder(self, source: Path) -> None:
        deploy(source, work=job("a100", "l4"))
        assert names(source.parent) == [
            "ckpt.fp16.onnx",
            "ckpt.fp16.sm80.rtx.engine", "ckpt.fp16.sm80.rtx.engine.json",
            "ckpt.fp16.sm89.rtx.engine", "ckpt.fp16.sm89.rtx.engine.json",
            "ckpt.onnx",
        ]  # fmt: skip

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_another_precision(self, source: Path, precision: Any) -> None:
        deploy(source, precision)
        assert f"ckpt.{precision}.sm80.rtx.engine" in names(source.parent)

    def test_a_half_precision_file_is_built_as_it_is(self, source: Path) -> None:
        half = deploy(source).files[0].path
        before = half.read_bytes()
        done = deploy(half, "fp16", work=job(rebuild=True))
        assert done.files == []
        assert done.engines[0].path.name == "ckpt.fp16.sm80.rtx.engine"
        assert half.read_bytes() == before

    def test_the_sidecar_says_what_it_is(self, source: Path) -> None:
        done = deploy(source)
        (engine,) = done.engines
        sidecar = check_engine(engine.path)
        half = done.files[0]
        assert sidecar.engine == {
            "file": engine.path.name, "sha256": compute_sha256(engine.path), "bytes": engine.path.stat().st_size,
        }  # fmt: skip
        assert (sidecar.builder["name"], sidecar.builder["version"]) == (TENSORRT_RTX, installed_version(TENSORRT_RTX))
        assert sidecar.builder["cuda"] == 13
        assert sidecar.target == {"sm": "sm80", "gpu": None, "current": False}
        assert sidecar.options["batch"] == [1, 2, 4]
        assert sidecar.options["tf32"] is False
        assert sidecar.onnx["file"] == "ckpt.fp16.onnx"
        assert sidecar.onnx["sha256"] == half.metadata.file_sha256
        assert sidecar.state == {"state": "unverified", "why": engine_export.NEVER_RUN}
        assert sidecar.metadata == onnx_file.read_metadata(half.path)
        assert len(sidecar.metadata.test_vectors["pictures"]) == 4

    def test_the_engine_is_what_the_builder_wrote_and_nothing_else(self, source: Path) -> None:
        (engine,) = deploy(source).engines
        # NVIDIA's own tools read it: no prefix of ours before the builder's mark
        assert engine.path.read_bytes()[1:4] == b"trt"

    def test_no_verify_is_on_record_in_the_file_and_the_engine(self, source: Path) -> None:
        done = deploy(source, verify=False)
        assert done.files[0].metadata.unverified == "exported with --no-verify"
        assert check_engine(done.engines[0].path).metadata.unverified == "exported with --no-verify"

    def test_it_needs_no_torch(self, source: Path) -> None:
        program = (
            "import sys; sys.modules['torch'] = None; sys.modules['torchvision'] = None\n"
            "sys.argv = ['opal-deploy', 'export', sys.argv[1], '--trt', '--batch', '1:2:4', '--threads', '2']\n"
            "from opal_deploy.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(source)], capture_output=True, text=True, env=os.environ, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "ckpt.fp16.sm80.rtx.engine" in names(source.parent)


class TestFromACheckpoint:
    def test_fp32_and_fp16_files_and_the_engine_in_one_go(self, make_checkpoint: Any, tmp_path: Path) -> None:
        options = ExportOptions(precision="fp16", threads=2)
        source = tmp_path / "ckpt.pt"
        done = deploy_checkpoint(make_checkpoint(seed=8), source, options, tmp_path, job(), NO_GPU)
        assert names(tmp_path) == [
            "ckpt.fp16.onnx", "ckpt.fp16.sm80.rtx.engine", "ckpt.fp16.sm80.rtx.engine.json", "ckpt.onnx",
        ]  # fmt: skip
        assert [file.metadata.verification["reference"][:7] for file in done.files] == ["PyTorch", "PyTorch"]
        assert "emulated" in done.files[1].metadata.verification["candidate"]

    def test_a_second_time_the_engine_is_found(self, make_checkpoint: Any, tmp_path: Path) -> None:
        options = ExportOptions(precision="fp16", threads=2)
        found = [
            deploy_checkpoint(make_checkpoint(seed=8), tmp_path / "c.pt", options, tmp_path, job(), NO_GPU).engines[0]
            for _ in range(2)
        ]
        assert [engine.reused for engine in found] == [False, True]

    def test_a_gate_that_fails_leaves_nothing_at_all(self, make_checkpoint: Any, tmp_path: Path) -> None:
        checkpoint: Checkpoint = make_checkpoint(seed=3)
        first, second = checkpoint.network.backbone.body.first, checkpoint.network.backbone.body.second
        # activations overflow float16 although no weight does
        first.weight.data.mul_(3e4)
        first.bias.data.mul_(3e4)
        second.weight.data.div_(3e4)
        options = ExportOptions(precision="fp16", threads=2)
        with pytest.raises(VerificationError) as failure:
            deploy_checkpoint(checkpoint, tmp_path / "ckpt.pt", options, tmp_path, job(), NO_GPU)
        assert failure.value.exit_code == 4
        # the picture and the layer are named
        assert "worst on creature " in str(failure.value)
        assert "Conv backbone.body.first.weight is the first layer to overflow" in str(failure.value)
        assert names(tmp_path) == []


class TestAnEngineThatIsThere:
    def test_the_same_again_is_found_and_said(self, source: Path) -> None:
        said: list[str] = []
        (first,) = deploy(source).engines
        before = first.path.stat().st_mtime_ns
        wanted = ExportOptions(precision="fp16", threads=2)
        (again,) = deploy_onnx(source, wanted, source.parent, job(), NO_GPU, said.append).engines
        assert again.reused
        assert first.path.stat().st_mtime_ns == before
        assert any(line.startswith("Reusing") and "ckpt.fp16.sm80.rtx.engine" in line for line in said)

    @pytest.mark.parametrize("change", ["options", "rebuild", "damaged", "no sidecar", "class names", "builder"])
    def test_anything_else_is_built_anew(self, source: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (first,) = deploy(source).engines
        work = job()
        if change == "options":
            work = job(options=BuildOptions(batch=BatchRange(1, 2, 8)))
        elif change == "rebuild":
            work = job(rebuild=True)
        elif change == "damaged":
            content = bytearray(first.path.read_bytes())
            content[-1] ^= 1
            first.path.write_bytes(content)
        elif change == "no sidecar":
            sidecar_path(first.path).unlink()
        elif change == "class names":
            _rename_classes(source)
        else:
            load = engine_export.load
            monkeypatch.setattr(engine_export, "load", lambda *call: replace(load(*call), version="1.8.0.0"))
        (again,) = deploy(source, work=work).engines
        assert not again.reused
        assert check_engine(again.path).key == again.sidecar.key

    def test_another_network_under_the_same_name_is_built_anew(self, source: Path, make_checkpoint: Any) -> None:
        (first,) = deploy(source).engines
        export_checkpoint(make_checkpoint(seed=5), source, ExportOptions(out=source, threads=2))
        (again,) = deploy(source).engines
        assert not again.reused
        assert again.sidecar.engine["sha256"] != first.sidecar.engine["sha256"]


def _rename_classes(path: Path) -> None:
    metadata = onnx_file.read_metadata(path)
    changed = replace(metadata, class_names=("w", "x", "y", "z"), file_sha256="0" * 64)
    model = onnx.load(path)
    model.metadata_props[0].value = changed.to_json()
    path.write_bytes(model.SerializeToString())
    onnx_file.embed_digest(path)


class TestFailures:
    """One line, and what was there stays as it was."""

    @pytest.fixture
    def before(self, source: Path) -> dict[str, bytes]:
        deploy(source)
        return self.content(source.parent)

    @staticmethod
    def content(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def test_a_builder_that_gives_up(self, source: Path, before: dict[str, bytes]) -> None:
        work = job(options=BuildOptions(batch=BatchRange(1, 2, 4), workspace=1024))
        with pytest.raises(UsageError, match="could not build"):
            deploy(source, work=work)
        assert self.content(source.parent) == before

    def test_the_second_of_two_builds_gives_up(
        self, source: Path, before: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build = Network.build

        def fail(self: Network, choice: Any, *rest: Any) -> Any:
            if choice.target == "sm89":
                raise UsageError("no")
            return build(self, choice, *rest)

        monkeypatch.setattr(Network, "build", fail)
        with pytest.raises(UsageError, match="no"):
            deploy(source, work=job("sm80", "sm89", rebuild=True))
        assert self.content(source.parent) == before

    def test_ctrl_c(self, source: Path, before: dict[str, bytes]) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            deploy(source, work=job(rebuild=True, advance=interrupt))
        assert self.content(source.parent) == before

    def test_a_disk_that_is_full(self, source: Path, before: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        write = Path.write_bytes

        def full(self: Path, content: bytes) -> int:
            if ".engine" in self.name:
                write(self, content[:100])
                raise OSError(28, os.strerror(28))
            return write(self, content)

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(UsageError, match=r"cannot be written \(No space left"):
            deploy(source, work=job(rebuild=True))
        monkeypatch.undo()
        assert self.content(source.parent) == before

    @pytest.mark.parametrize("damage", ["flipped", "truncated", "foreign"])
    def test_a_source_that_is_not_ours_is_refused_before_the_parser_sees_it(
        self, source: Path, damage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def seen(*_: Any, **__: Any) -> None:
            raise AssertionError("the parser saw it")

        monkeypatch.setattr(engine_export, "Network", seen)
        content = source.read_bytes()
        if damage == "flipped":
            source.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
        elif damage == "truncated":
            source.write_bytes(content[: len(content) // 2])
        else:
            model = onnx.load(source)
            del model.metadata_props[:]
            source.write_bytes(model.SerializeToString())
        for precision in ("fp32", "fp16"):
            with pytest.raises(ArtifactError):
                deploy(source, precision)
        assert names(source.parent) == ["ckpt.onnx"]


class TestCommands:
    """The first two commands of the design, exactly as written, one after the other."""

    def test_export_trt_then_infer_explain(
        self, opal: Any, exact_model: Path, make_pictures: Any, tmp_path: Path
    ) -> None:
        shutil.copy(exact_model.with_suffix(".pt"), tmp_path / "ckpt.pt")
        make_pictures(tmp_path / "images", 3)
        exported = opal("export", "ckpt.pt", "--trt", cwd=tmp_path)
        assert exported.returncode == 0, exported.stderr
        assert "Wrote ckpt.onnx" in exported.stderr
        assert "Wrote ckpt.fp16.onnx" in exported.stderr
        assert "Building for sm80 with TensorRT for RTX" in exported.stderr
        assert "unverified: it was never run on hardware" in exported.stderr
        assert exported.stderr.splitlines()[-1] == "Next: opal-deploy infer images/ --explain"
        inferred = opal("infer", "images/", "--explain", cwd=tmp_path)
        assert inferred.returncode == 0, inferred.stderr
        assert "not ckpt.fp16.sm80.rtx.engine (" in inferred.stderr
        assert "3 images in" in inferred.stderr
        assert (tmp_path / "explanations" / "report.html").is_file()

    def test_the_document_names_files_and_engines(self, opal: Any, source: Path) -> None:
        done = opal("export", source.name, "--trt", "--target", "a100", "--target", "l4", "--json", cwd=source.parent)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert [file["path"] for file in document["files"]] == ["ckpt.fp16.onnx"]
        assert [engine["target"]["sm"] for engine in document["engines"]] == ["sm80", "sm89"]
        assert {engine["state"]["state"] for engine in document["engines"]} == {"unverified"}

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["--target", "a100"], "--target: about engines; add --trt"),
            (["--trt", "--out", "x.engine"], "--out x.engine: with --trt a folder is expected"),
            (["--trt", "--target", "h100"], "sm90 (H100, H200)"),
            (["--trt", "--batch", "9:1:2"], "expected 1 <= MIN <= OPT <= MAX"),
            (["--trt", "--precision", "int8"], "--precision int8 needs --calibrate DIR"),
            (["--trt", "--calibrate", "."], "only int8 is calibrated"),
            (["--trt", "--version-compatible"], "--version-compatible: TensorRT for RTX has no such thing"),
            (["--trt", "--builder", "tensorrt"], "tensorrt"),
        ],
    )
    def test_a_call_that_makes_no_sense_is_one_line(self, opal: Any, source: Path, arguments: Any, line: str) -> None:
        done = opal("export", source.name, *arguments, cwd=source.parent)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert line in done.stderr.splitlines()[-1]
        assert names(source.parent) == ["ckpt.onnx"]


def test_the_checkpoints_way_is_the_files_way() -> None:
    # one implementation of building, whatever it begins with
    assert from_checkpoint.staged_engines is engine_export.staged_engines
