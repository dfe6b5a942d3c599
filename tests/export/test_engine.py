"""Engines of an export: names, sidecars, an engine that is there already, and what failures leave."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import check_engine, sidecar_path
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.errors import UsageError
from opal_deploy.export import engine
from opal_deploy.export.builder import Network, choose_engine_targets
from opal_deploy.export.exporter import export
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.plan import EngineTargets, plan_export
from opal_deploy.runtime.devices import Driver
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version
from tests.builders import build_checkpoint
from tests.export.conftest import needs_rtx

pytestmark = needs_rtx

NO_GPU = Driver(problem="no NVIDIA driver found")
ENGINE = "ckpt.fp16.sm80.rtx.engine"


@pytest.fixture
def source(fp32, tmp_path):
    return Path(shutil.copy(fp32, tmp_path / "ckpt.onnx"))


@pytest.fixture(scope="module")
def built(fp32, tmp_path_factory):
    """A folder with `ckpt.onnx`, its fp16 file and an engine; never written to."""
    folder = tmp_path_factory.mktemp("built")
    build(Path(shutil.copy(fp32, folder / "ckpt.onnx")))
    return folder


@pytest.fixture
def again(built, tmp_path):
    """The source in a copy of `built`."""
    for path in built.iterdir():
        shutil.copy2(path, tmp_path / path.name)
    return tmp_path / "ckpt.onnx"


def build(source, precision=None, *sms, folder=None, **options):
    export_source = OnnxSource(source) if isinstance(source, Path) else source
    fixed = {"builder": "tensorrt-rtx", "target": sms, "threads": 2, "overwrite": True, "precision": precision}
    options = ExportOptions(**{"batch": "1:2:4", **fixed, **options})
    engines = EngineTargets(choose_engine_targets(options, NO_GPU), folder or export_source.path.parent, NO_GPU)
    return export(plan_export(export_source, options, engines))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestFiles:
    def test_they_are_named_by_model_precision_gpu_and_builder(self, source):
        result = build(source, None, "a100", "l4")
        assert names(source.parent) == [
            "ckpt.fp16.onnx", ENGINE, f"{ENGINE}.json",
            "ckpt.fp16.sm89.rtx.engine", "ckpt.fp16.sm89.rtx.engine.json", "ckpt.onnx",
        ]  # fmt: skip
        # NVIDIA's own tools read an engine: no prefix of ours before the builder's mark
        assert {exported.path.read_bytes()[1:4] for exported in result.engines} == {b"trt"}

    def test_the_sidecar_says_what_it_is(self, built):
        path, half = built / ENGINE, onnx_file.read_metadata(built / "ckpt.fp16.onnx")
        sidecar = check_engine(path)
        assert sidecar.engine == {"file": ENGINE, "sha256": compute_sha256(path), "bytes": path.stat().st_size}
        assert (sidecar.builder["name"], sidecar.builder["version"]) == (TENSORRT_RTX, installed_version(TENSORRT_RTX))
        assert sidecar.builder["cuda"] == 13
        assert sidecar.target == {"sm": "sm80", "gpu": None}
        assert sidecar.options["batch"] == [1, 2, 4]
        assert sidecar.options["tf32"] is False
        assert (sidecar.onnx["file"], sidecar.onnx["sha256"]) == ("ckpt.fp16.onnx", half.file_sha256)
        assert sidecar.state == {"state": "unverified", "why": engine.NEVER_RUN}
        assert sidecar.metadata == half
        assert len(sidecar.metadata.test_vectors["images"]) == 4

    def test_inspect_describes_it_without_running_it_and_shows_damage(self, again, opal):
        path = again.parent / ENGINE
        shown = opal("inspect", path).stdout
        for part in ("tensorrt-rtx 1.", "sm80, batches 1:2:4", "ckpt.fp16.onnx", "unverified", "matches the file"):
            assert part in shown
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        document = json.loads(opal("inspect", path, "--json").stdout)
        assert (document["kind"], document["intact"], document["checks"]) == ("engine", False, [])
        assert document["metadata"]["test_vectors"] == {"images": 4}

    def test_what_is_made_without_verification_or_from_an_unverified_file_says_so(self, write_onnx, tmp_path):
        source = write_onnx(build_checkpoint(seed=8), tmp_path / "c.onnx", verify=False).path
        doubt = "made from c.onnx, which was exported with --no-verify"
        for verify, unverified in ((True, doubt), (False, "exported with --no-verify")):
            result = build(source, verify=verify, rebuild=True)
            assert onnx_file.read_metadata(result.onnx[0].path).unverified == unverified
            assert check_engine(result.engines[0].path).metadata.unverified == unverified


class TestAnEngineThatIsThere:
    def test_the_same_is_reused_and_its_sidecar_follows_the_onnx_file(self, again, make_pictures):
        messages = []
        before, sidecar = (again.parent / ENGINE).stat().st_mtime_ns, sidecar_path(again.parent / ENGINE).read_bytes()
        (reused,) = build(again, log=messages.append).engines
        assert any(line.startswith("Reusing") and ENGINE in line for line in messages)
        assert sidecar_path(reused.path).read_bytes() == sidecar
        # the same graph in a file with another report
        make_pictures(again.parent / "images", 12)
        (reused,) = build(again, images=again.parent / "images").engines
        assert reused.reused
        assert reused.path.stat().st_mtime_ns == before
        followed = check_engine(reused.path)
        assert followed.onnx["sha256"] == onnx_file.read_metadata(again.with_name("ckpt.fp16.onnx")).file_sha256
        assert followed.metadata.verification["image_set"] == "12 images from images"
        # and with what was measured since
        calibration = {"method": "temperature", "images": 60, "temperature": 0.125, "ece": 0.02}
        calibration |= dict.fromkeys(("when", "opal_deploy", "model", "data", "split"), "x")
        onnx_file.rewrite_metadata(again, replace(onnx_file.read_metadata(again), calibration=calibration))
        (reused,) = build(again).engines
        assert (reused.reused, reused.sidecar.metadata.temperature) == (True, 0.125)

    @pytest.mark.parametrize("change", ["damaged", "class names", "network"])
    def test_anything_else_is_built_anew(self, again, write_onnx, change):
        path = again.parent / ENGINE
        before, plan = check_engine(path).engine["sha256"], path.read_bytes()
        changes = {
            "damaged": lambda: path.write_bytes(plan[:-1] + bytes([plan[-1] ^ 1])),
            "class names": lambda: _rename_classes(again),
            "network": lambda: write_onnx(build_checkpoint(seed=5), again),
        }
        changes[change]()
        (exported,) = build(again).engines
        assert not exported.reused
        assert check_engine(path).key == exported.sidecar.key
        if change == "network":
            assert exported.sidecar.engine["sha256"] != before


def _rename_classes(path):
    onnx_file.rewrite_metadata(path, replace(onnx_file.read_metadata(path), class_names=("w", "x", "y", "z")))


def test_what_was_there_stays_if_the_second_of_two_builds_gives_up(again, monkeypatch):
    before, build_network = content(again.parent), Network.build

    def fail(self, target, *rest):
        if target.sm == "sm89":
            raise UsageError("could not build sm89")
        return build_network(self, target, *rest)

    monkeypatch.setattr(Network, "build", fail)
    with pytest.raises(UsageError, match="sm89"):
        build(again, None, "sm80", "sm89", rebuild=True)
    assert content(again.parent) == before
