"""A tiny network as files, and one engine: a stand-in on the CPU, or built and run on a GPU (marker `gpu`)."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import BatchRange, write_sidecar
from opal_deploy.export.builder import choose_engine_targets
from opal_deploy.export.exporter import export
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.plan import EngineTargets, ExportPlan
from opal_deploy.runtime import engine_session, tensorrt
from opal_deploy.runtime.devices import Driver, Gpu, read_driver
from opal_deploy.runtime.engine_session import EngineSession
from opal_deploy.runtime.tensorrt import AHEAD_OF_TIME, TENSORRT, Bindings, platform_name, sm_name
from tests.builders import build_checkpoint, build_sidecar, export_onnx
from tests.runtime.fakes import FakeCuda, FakeTensorRT


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    checkpoint = build_checkpoint()
    path = export_onnx(checkpoint, tmp_path_factory.mktemp("tiny") / "c.onnx").path
    return SimpleNamespace(checkpoint=checkpoint, path=path)


@pytest.fixture(scope="session")
def tiny_fp16(tiny, tmp_path_factory):
    return export_onnx(tiny.path, tmp_path_factory.mktemp("tiny16") / "c.fp16.onnx", "fp16").path


@pytest.fixture(scope="session")
def another(tmp_path_factory):
    return export_onnx(build_checkpoint(seed=1), tmp_path_factory.mktemp("another") / "other.onnx").path


VERSION = "11.4.0.106"
L4 = Gpu(0, "NVIDIA L4", 24 << 30, (8, 9))
DRIVER = Driver("580.95.05", (13, 0), (L4,))


@dataclass
class Stand:
    """An engine on disk and the machine that it is loaded on.

    `version` is that of the installed library, `lean` that of TensorRT's lean runtime; None where it is not installed.
    """

    path: Path
    onnx: Path
    cuda: FakeCuda
    trt: FakeTensorRT
    name: str
    driver: Driver = DRIVER
    version: str | None = VERSION
    lean: str | None = None

    def open(self, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_session, "read_driver", lambda: self.driver)
            patch.setattr(engine_session, "Cuda", lambda index, extra: self.cuda)
            versions = {self.name: self.version, "tensorrt-lean": self.lean}
            patch.setattr(tensorrt, "installed_version", versions.get)
            patch.setattr(tensorrt, "load", lambda name, _: Bindings(name, self.trt, str(versions[name])))
            return EngineSession(self.path, **options)

    def describe(self, batch=(1, 2, 4), **changes):
        """Write the sidecar that a build of the ONNX file for an L4 would have, and return it."""
        metadata = onnx_file.read_metadata(self.onnx)
        parts = {
            "builder": {"name": self.name, "version": VERSION, "cuda": 13, "platform": platform_name()},
            "options": {"batch": list(batch)},
            "onnx": {"file": self.onnx.name, "sha256": metadata.file_sha256, "graph": "0" * 64},
        }
        sidecar = build_sidecar(self.path, metadata, **{**parts, **changes})
        write_sidecar(self.path, sidecar)
        return sidecar


@pytest.fixture
def make_stand(tmp_path, tiny_fp16):
    def make(onnx=tiny_fp16, batch=(1, 2, 4), *, rtx=False):
        path = tmp_path / "c.fp16.sm89.trt.engine"
        path.write_bytes(onnx.read_bytes())
        cuda = FakeCuda(L4)
        stand = Stand(path, onnx, cuda, FakeTensorRT(cuda), "tensorrt-rtx" if rtx else "tensorrt")
        stand.describe(batch)
        return stand

    return make


@pytest.fixture
def stand(make_stand):
    return make_stand()


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def open_engine_for(request, make_stand, tmp_path):
    """`open(onnx, batch, **options)`: a session on an engine of that file, a stand-in or built and run on the GPU."""
    if request.param == "stand-in":
        return lambda onnx, batch, **options: make_stand(onnx, batch).open(**options)

    def open_real(onnx, batch, **options):
        driver = read_driver()
        here = sm_name(driver.gpus[0].compute_capability)
        if tensorrt.installed_version(TENSORRT) is None and here not in AHEAD_OF_TIME:
            pytest.skip(f"{here}: TensorRT for RTX builds nothing for it, and TensorRT is not installed")
        build = ExportOptions(batch=str(BatchRange(*batch)))
        engines = EngineTargets(choose_engine_targets(build, driver), tmp_path, driver)
        built = export(ExportPlan(OnnxSource(onnx), build, {}, engines)).engines
        return EngineSession(built[0].path, **options)

    return open_real
