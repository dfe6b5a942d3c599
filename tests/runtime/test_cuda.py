"""`Cuda` over cuda-bindings: it calls functions that exist, and a failed call is one line with CUDA's text."""

import inspect
import re
from types import SimpleNamespace

import pytest

from opal_deploy.errors import MissingExtra, OutOfMemory, StoppedEarly, UsageError
from opal_deploy.runtime import cuda
from opal_deploy.runtime.cuda import Cuda, load_cuda_libraries
from opal_deploy.runtime.devices import Driver, Gpu

bindings = pytest.importorskip("cuda.bindings")
L4 = Gpu(0, "NVIDIA L4", 24 << 30, (8, 9))
TEXTS = {2: b"out of memory", 35: b"CUDA driver version is insufficient", 719: b"launch failure"}


@pytest.fixture
def runtime(monkeypatch):
    """The functions that `Cuda` calls when it is opened, on a machine with one L4."""
    properties = SimpleNamespace(
        name=b"NVIDIA L4", totalGlobalMem=24 << 30, major=8, minor=9, uuid=SimpleNamespace(bytes=bytes(range(16)))
    )
    fake = SimpleNamespace(
        cudaGetDeviceCount=lambda: (0, 1),
        cudaGetDeviceProperties=lambda index: (0, properties),
        cudaGetErrorString=lambda code: (0, TEXTS[code]),
    )
    monkeypatch.setattr(bindings, "runtime", fake, raising=False)
    return fake


def test_every_function_exists_in_the_bindings():
    from cuda.bindings import runtime as real

    source = inspect.getsource(cuda)
    names = set(re.findall(r"\bcuda[A-Z]\w+", source))
    assert len(names) > 20
    enums = (real.cudaMemcpyKind, real.cudaStreamCaptureMode, real.cudaError_t)
    assert names - {*dir(real), *(name for enum in enums for name in dir(enum))} == set()


def test_a_device_is_described_and_another_or_an_old_driver_is_refused_in_one_line(runtime, monkeypatch):
    device = Cuda(0, "gpu")
    assert (device.gpu.name, device.gpu.memory, device.gpu.compute_capability) == ("NVIDIA L4", 24 << 30, (8, 9))
    assert device.uuid == "000102030405060708090a0b0c0d0e0f"
    with pytest.raises(UsageError, match="device cuda:3: CUDA sees 1 GPUs"):
        Cuda(3, "gpu")
    runtime.cudaGetDeviceCount = lambda: (35, 0)
    monkeypatch.setattr(cuda, "read_driver", lambda: Driver("550.54", (12, 4), (L4,)))
    with pytest.raises(UsageError, match=r"cuda:0: driver 550\.54 runs CUDA 12\.4 .*; update .* or use --device cpu\Z"):
        Cuda(0, "gpu")


@pytest.mark.parametrize(("code", "error"), [(2, OutOfMemory), (719, StoppedEarly)])
def test_a_failed_call_has_cudas_text(runtime, code, error):
    runtime.cudaMalloc = lambda size: (code, 0)
    with pytest.raises(error, match=rf"CUDA device 0: cudaMalloc failed: {TEXTS[code].decode()}") as failure:
        Cuda(0, "gpu").allocate(8)
    assert type(failure.value) is error


def test_without_the_bindings_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"cuda-bindings.*opal-deploy\[trt-rtx\]"):
        Cuda(0, "trt-rtx")


def test_a_library_that_is_not_found_does_not_keep_the_others_from_loading(monkeypatch):
    pathfinder, names = pytest.importorskip("cuda.pathfinder"), []

    def search(name):
        names.append(name)
        if name != "cublas":
            raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", search)
    load_cuda_libraries()
    # each before the one that needs it
    assert names.index("cublasLt") < names.index("cublas") < names.index("cudnn")
