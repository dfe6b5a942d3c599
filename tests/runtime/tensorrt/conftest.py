"""One engine, computed by a stand-in on the CPU or by the real library on a GPU (marker `gpu`)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import Sidecar, write_sidecar
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.runtime.nvml import Driver, Gpu
from opal_deploy.runtime.tensorrt.bindings import Bindings
from opal_deploy.runtime.tensorrt.compatibility import platform_name
from opal_deploy.runtime.tensorrt.session import EngineSession

VERSION = "11.4.0.106"
L4 = Gpu(0, "NVIDIA L4", 24 << 30, (8, 9))
DRIVER = Driver("580.95.05", (13, 0), (L4,))


def _load_fakes() -> ModuleType:
    name = "opal_tests_tensorrt_fakes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fakes.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    return _load_fakes()


def sidecar_for(onnx: Path, engine: Path, batch: tuple[int, int, int] = (1, 2, 4), **changes: Any) -> Sidecar:
    """What a build of `onnx` for an L4 would have written, except that the plan is the ONNX file itself."""
    metadata = onnx_file.read_metadata(onnx)
    sidecar = Sidecar(
        engine={"file": engine.name, "sha256": compute_sha256(engine), "bytes": engine.stat().st_size},
        builder={"name": "tensorrt", "version": VERSION, "cuda": 13, "platform": platform_name()},
        target={"sm": "sm89", "gpu": "NVIDIA L4", "current": False},
        options={
            "batch": list(batch),
            "strip_weights": False,
            "version_compatible": False,
            "hardware_compatible": None,
        },
        onnx={"file": onnx.name, "sha256": metadata.file_sha256, "graph": "0" * 64},
        key="1" * 64,
        built={"when": "2026-11-21T00:00:00+00:00", "seconds": 1.0, "opal_deploy": "0.1.0", "driver": None},
        state={"state": "unverified", "why": "never run"},
        metadata=metadata,
    )
    return replace(sidecar, **changes)


@dataclass
class Stand:
    """An engine on disk and the machine that it is loaded on."""

    path: Path
    onnx: Path
    cudart: Any
    trt: Any
    driver: Driver
    library: Bindings

    def open(self, **options: Any) -> EngineSession:
        return EngineSession(self.path, library=self.library, cuda_runtime=self.cudart, driver=self.driver, **options)

    def describe(self, batch: tuple[int, int, int] = (1, 2, 4), **changes: Any) -> Sidecar:
        """Write the sidecar anew."""
        sidecar = sidecar_for(self.onnx, self.path, batch, **changes)
        write_sidecar(self.path, sidecar)
        return sidecar


MakeStand = Callable[..., Stand]


@pytest.fixture
def make_stand(tmp_path: Path, tiny_fp16: Path, fakes: ModuleType) -> MakeStand:
    def make(
        onnx: Path = tiny_fp16, batch: tuple[int, int, int] = (1, 2, 4), *, rtx: bool = False, **changes: Any
    ) -> Stand:
        path = tmp_path / "c.fp16.sm89.trt.engine"
        path.write_bytes(onnx.read_bytes())
        cudart = fakes.FakeCudart()
        trt = fakes.FakeTensorRT(cudart, rtx=rtx)
        name = "tensorrt-rtx" if rtx else "tensorrt"
        stand = Stand(path, onnx, cudart, trt, DRIVER, Bindings(name, trt, VERSION, 13))
        if rtx:
            changes.setdefault("builder", {"name": name, "version": VERSION, "cuda": 13, "platform": platform_name()})
        stand.describe(batch, **changes)
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
