"""The model that `infer` chooses when none is named, and the refusal where it cannot choose."""

import os
import shutil
from pathlib import Path

import onnx
import pytest
from onnx import parser

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import write_sidecar
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.runtime.select import find_model, find_newest_run, open_sessions
from tests.builders import build_sidecar

GOLDEN = Path(__file__).parents[1] / "golden/0.1.0"


# of other code
MODEL = '<ir_version: 10, opset_import: ["": 20]> g (float[1] x) => (float[1] y) { y = Relu (x) }'


def find(folder, gpu=False, misfit=lambda _: "", **options):
    return find_model(folder, gpu=gpu, check_engine=misfit, **options)


@pytest.fixture
def folder(tiny, tiny_fp16, tmp_path):
    """Two precisions of one checkpoint, and the checkpoint."""
    shutil.copy(tiny.path, tmp_path / "ckpt.onnx")
    shutil.copy(tiny_fp16, tmp_path / "ckpt.fp16.onnx")
    (tmp_path / "ckpt.pt").write_bytes(b"")
    return tmp_path


class TestOneCheckpoint:
    def test_half_precision_is_taken_on_a_gpu_only(self, folder):
        assert find(folder, gpu=True).path.name == "ckpt.fp16.onnx"
        choice = find(folder)
        assert choice.path.name == "ckpt.onnx"
        assert choice.reason == "fp32, no usable GPU; not ckpt.fp16.onnx (fp16)"

    def test_the_only_precision_is_taken_anywhere(self, folder):
        shutil.copy(folder / "ckpt.onnx", folder / "a.onnx")
        assert find(folder).path.name == "a.onnx", "of equals the first by name"
        (folder / "a.onnx").unlink()
        (folder / "ckpt.onnx").unlink()
        assert find(folder).path.name == "ckpt.fp16.onnx"

    def test_other_onnx_files_and_subfolders_are_passed_over(self, folder, another):
        onnx.save(parser.parse_model(MODEL), folder / "aaa.onnx")
        (folder / "aab.onnx").write_bytes(b"\x13\x37" * 50)
        (folder / "aac.onnx").touch()
        (folder / "a.engine").write_bytes(b"an engine without its sidecar")
        # files that are being written
        shutil.copy(folder / "ckpt.onnx", folder / ".a.onnx.x1.part.onnx")
        (folder / ".b.engine").write_bytes(b"half")
        (folder / "sub").mkdir()
        shutil.copy(another, folder / "sub" / "other.onnx")
        assert find(folder).path.name == "ckpt.onnx"


class TestEngines:
    """An engine that fits comes before every ONNX file."""

    @pytest.fixture
    def with_engines(self, folder):
        for name in ("ckpt.fp16.sm80.rtx.engine", "ckpt.fp16.sm89.trt.engine", "ckpt.fp32.sm89.trt.engine"):
            (folder / name).write_bytes(b"a plan")
            metadata = onnx_file.read_metadata(folder / ("ckpt.onnx" if "fp32" in name else "ckpt.fp16.onnx"))
            target = {"sm": name.split(".")[2]}
            write_sidecar(folder / name, build_sidecar(folder / name, metadata, target=target))
        return folder

    def test_the_one_that_fits_is_taken_and_the_others_reasons_are_given(self, with_engines):
        choice = find(with_engines, True, lambda s: "" if s.target["sm"] == "sm89" else "it was built for sm80")
        assert choice.path.name == "ckpt.fp16.sm89.trt.engine"
        assert choice.reason.startswith("fp16 engine, a GPU is usable; not ckpt.fp32.sm89.trt.engine (fp32); ")
        assert choice.reason.endswith("not ckpt.fp16.sm80.rtx.engine (it was built for sm80)")

    def test_where_none_fits_an_onnx_file_is_taken_or_the_reason_given(self, with_engines):
        choice = find(with_engines, misfit=lambda _: "no GPU")
        assert choice.path.name == "ckpt.onnx"
        assert choice.reason.count("(no GPU)") == 3
        for path in with_engines.glob("*.onnx"):
            path.unlink()
        with pytest.raises(UsageError, match=r"none of the models here can run on this machine: .*no GPU"):
            find(with_engines, misfit=lambda _: "no GPU")


class TestRuns:
    """The models that `train` and `export` leave in `runs`."""

    @pytest.fixture
    def runs(self, tiny, tmp_path):
        """Two runs, of which `a` was trained last; its last weights were exported too."""
        for age, name in enumerate(["a", "b"]):
            (tmp_path / "runs" / name).mkdir(parents=True)
            for file in ("best.pt", "best.onnx", "last.pt"):
                shutil.copy(tiny.path, tmp_path / "runs" / name / file)
                os.utime(tmp_path / "runs" / name / file, (1e9 - age, 1e9 - age))
        return tmp_path

    def test_the_run_with_the_newest_best_model_is_found(self, runs):
        (runs / "notes.txt").touch()
        assert find_newest_run(runs) == runs / "runs/a"
        # a last.pt that grows is no finished model
        (runs / "runs/b/last.pt").touch()
        assert find_newest_run(runs) == runs / "runs/a"
        (runs / "runs/b/best.onnx").touch()
        assert find_newest_run(runs) == runs / "runs/b"

    def test_a_newer_run_that_is_not_exported_yet_is_passed_over(self, runs):
        (runs / "runs/a/best.onnx").unlink()
        assert find_newest_run(runs) == runs / "runs/b"
        assert find_newest_run(runs, "torch") == runs / "runs/a"
        (runs / "runs/b/best.onnx").unlink()
        assert find_newest_run(runs) == runs / "runs/a"

    def test_other_models_of_the_run_are_passed_over(self, runs, another):
        shutil.copy(another, runs / "runs/a/last.onnx")
        choice = find(runs / "runs/a", prefix="best.")
        assert choice.path == runs / "runs/a/best.onnx"
        choice = find(runs / "runs/a", runtime="torch", prefix="best.")
        assert choice.path == runs / "runs/a/best.pt"

    def test_any_model_in_the_folder_itself_comes_first(self, runs):
        (runs / "damaged.onnx").touch()
        assert find_newest_run(runs) is None
        assert find_newest_run(runs / "runs") is None


@pytest.mark.parametrize(
    ("name", "says"), [("nowhere.onnx", "no such model"), (".", "no such model"), ("m.tflite", r"expected \.onnx")]
)
def test_what_is_no_model_is_refused(tmp_path, name, says):
    (tmp_path / "m.tflite").touch()
    with pytest.raises(ArtifactError, match=says):
        open_sessions(tmp_path / name)


class TestRuntimes:
    """What --runtime names."""

    def test_only_its_models_are_considered(self, folder):
        assert find(folder, runtime="onnxruntime").path.suffix == ".onnx"
        assert find(folder, runtime="torch").path.name == "ckpt.pt"
        with pytest.raises(UsageError, match=r"no exported model .*--runtime tensorrt"):
            find(folder, runtime="tensorrt")
        (folder / "other.pt").touch()
        with pytest.raises(UsageError, match=r"ckpt\.pt, other\.pt"):
            find(folder, runtime="torch")

    def test_bf16_is_taken_by_openvino_and_not_by_onnx_runtime(self, tmp_path):
        shutil.copy(GOLDEN / "model.bf16.onnx", tmp_path)
        with pytest.raises(UsageError, match=r"model\.bf16\.onnx: bf16 runs in OpenVINO \(pip .*\) and in engines"):
            find(tmp_path, runtime="onnxruntime")
        chosen = find(tmp_path).path
        assert chosen.name == "model.bf16.onnx"
        (session,) = open_sessions(chosen)
        assert session.description.startswith("OpenVINO")

    def test_another_kind_of_model_is_refused(self, folder):
        with pytest.raises(UsageError, match="--runtime torch runs a checkpoint"):
            open_sessions(folder / "ckpt.onnx", runtime="torch")
