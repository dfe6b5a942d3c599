"""One engine, computed by a stand-in on the CPU or by the real library on a GPU (marker `gpu`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import Sidecar, write_sidecar
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.runtime.nvml import Driver, Gpu
from opal_deploy.runtime.tensorrt import bindings, session
from opal_deploy.runtime.tensorrt.bindings import Bindings
from opal_deploy.runtime.tensorrt.compatibility import platform_name
from opal_deploy.runtime.tensorrt.session import EngineSession
from tests.runtime.tensorrt.fakes import FakeCuda, FakeTensorRT

VERSION = "11.4.0.106"
L4 = Gpu(0, "NVIDIA L4", 24 << 30, (8, 9))
DRIVER = Driver("580.95.05", (13, 0), (L4,))


@dataclass
class Stand:
    """An engine on disk and the machine that it is loaded on; `version` is None where no library is installed."""

    path: Path
    onnx: Path
    cuda: FakeCuda
    trt: FakeTensorRT
    name: str
    driver: Driver = DRIVER
    version: str | None = VERSION

    def open(self, **options: Any) -> EngineSession:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "read_driver", lambda: self.driver)
            patch.setattr(session, "Cuda", lambda index: self.cuda)
            patch.setattr(bindings, "installed_version", lambda name: self.version)
            patch.setattr(bindings, "load", lambda name, _: Bindings(name, self.trt, str(self.version), 13))
            return EngineSession(self.path, **options)

    def describe(self, batch: tuple[int, int, int] = (1, 2, 4), **changes: Any) -> Sidecar:
        """Write the sidecar that a build of the ONNX file for an L4 would have, and return it."""
        metadata = onnx_file.read_metadata(self.onnx)
        sidecar = Sidecar(
            engine={"file": self.path.name, "sha256": compute_sha256(self.path), "bytes": self.path.stat().st_size},
            builder={"name": self.name, "version": VERSION, "cuda": 13, "platform": platform_name()},
            target={"sm": "sm89", "gpu": "NVIDIA L4", "current": False},
            options={"batch": list(batch), "strip_weights": False, "version_compatible": False},
            onnx={"file": self.onnx.name, "sha256": metadata.file_sha256, "graph": "0" * 64},
            key="1" * 64,
            built={"when": "2026-11-21T00:00:00+00:00", "seconds": 1.0, "opal_deploy": "0.1.0", "driver": None},
            state={"state": "unverified", "why": "never run"},
            metadata=metadata,
        )
        write_sidecar(self.path, sidecar := replace(sidecar, **changes))
        return sidecar


MakeStand = Callable[..., Stand]


@pytest.fixture
def make_stand(tmp_path: Path, tiny_fp16: Path) -> MakeStand:
    def make(onnx: Path = tiny_fp16, batch: tuple[int, int, int] = (1, 2, 4), *, rtx: bool = False) -> Stand:
        path = tmp_path / "c.fp16.sm89.trt.engine"
        path.write_bytes(onnx.read_bytes())
        cuda = FakeCuda(L4)
        stand = Stand(path, onnx, cuda, FakeTensorRT(cuda, rtx=rtx), "tensorrt-rtx" if rtx else "tensorrt")
        stand.describe(batch)
        return stand

    return make


@pytest.fixture
def stand(make_stand: MakeStand) -> Stand:
    return make_stand()


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def open_engine_for(request: pytest.FixtureRequest, make_stand: MakeStand, tmp_path: Path) -> Callable[..., Any]:
    """`open(onnx, batch, **options)`: a session on an engine of that file, a stand-in or built and run on the GPU."""

    def fake(onnx: Path, batch: tuple[int, int, int], **options: Any) -> EngineSession:
        return make_stand(onnx, batch).open(**options)

    def real(onnx: Path, batch: tuple[int, int, int], **options: Any) -> EngineSession:
        from opal_deploy.artifact.engine_file import BatchRange
        from opal_deploy.export.exporter import export
        from opal_deploy.export.onnx_source import OnnxSource
        from opal_deploy.export.options import ExportTargets
        from opal_deploy.export.tensorrt.options import BuildOptions, EngineRequest, choose_engine_targets
        from opal_deploy.runtime.nvml import read_driver

        driver = read_driver()
        targets = choose_engine_targets(None, ["current"], driver)
        request = EngineRequest(targets, tmp_path, driver, BuildOptions(batch=BatchRange(*batch)))
        built = export(OnnxSource(onnx), ExportTargets({}, request)).engines
        return EngineSession(built[0].path, **options)

    return real if request.param == "real" else fake
