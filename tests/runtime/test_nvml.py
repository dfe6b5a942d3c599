"""The driver and its GPUs as NVML reports them: the real `pynvml` over a stand-in for the driver's C library."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from opal_deploy.runtime.nvml import Driver, Gpu, GpuSensors, NvmlError, read_driver

H200 = Gpu(0, "NVIDIA H200", 150_754_820_096, (9, 0))
NOT_SUPPORTED, NOT_FOUND, GPU_IS_LOST = 3, 6, 15


class FakeLibrary:
    """NVML's C functions as a machine with H200s answers them; each returns a status, 0 for success."""

    def __init__(self, count: int = 1, lost: int = 8, status: int = 0, reasons: int = 0) -> None:
        self.count, self.lost, self.status, self.reasons = count, lost, status, reasons
        self.opened: list[Any] = []

    def nvmlInitWithFlags(self, flags: int) -> int:
        return self.status

    def nvmlShutdown(self) -> int:
        return 0

    @property
    def nvmlErrorString(self) -> Any:
        return lambda code: b"Driver/library version mismatch"

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"580.95.05"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        number._obj.value = 13000
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        self.opened.append(index.value)
        return 0 if index.value < self.lost else GPU_IS_LOST

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        self.opened.append(uuid.value.decode())
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = H200.memory, 5_000_000_000
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = H200.compute_capability
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 699_500
        return 0

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, degrees: Any) -> int:
        degrees._obj.value = 88
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, megahertz: Any) -> int:
        return NOT_SUPPORTED

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        reasons._obj.value = self.reasons
        return 0


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a library in the place of the driver's."""

    def replace(library: Any) -> Any:
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return library

    return replace


@pytest.mark.parametrize(
    ("library", "driver"),
    [
        pytest.param(FakeLibrary(), Driver("580.95.05", (13, 0), (H200,)), id="one GPU"),
        pytest.param(
            FakeLibrary(count=2, lost=1),
            Driver("580.95.05", (13, 0), (H200,), "GPU 1 does not answer (lost, or no permission)"),
            id="a lost GPU does not hide the other",
        ),
        pytest.param(
            FakeLibrary(count=0),
            Driver("580.95.05", (13, 0), problem="the NVIDIA driver lists no GPU"),
            id="no GPU",
        ),
        pytest.param(
            FakeLibrary(status=18),
            Driver(problem="the NVIDIA driver does not answer: Driver/library version mismatch (18)"),
            id="a driver that does not start",
        ),
        pytest.param(
            object(), Driver(problem="libnvidia-ml.so.1 is not usable: Function Not Found"), id="another library"
        ),
    ],
)
def test_the_driver_is_read(use, library, driver):
    use(library)
    assert read_driver() == driver


def test_without_a_driver_the_missing_library_is_named(use, monkeypatch):
    use(None)

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "CDLL", missing)
    assert read_driver() == Driver(problem="no NVIDIA driver found (libnvidia-ml.so.1)")
    with pytest.raises(NvmlError, match="Not Found"):
        GpuSensors(0)


def test_sensors_leave_out_what_the_gpu_does_not_report(use):
    use(FakeLibrary())
    assert GpuSensors(0).read() == {"power_watts": 699.5, "temperature_celsius": 88, "memory_used_mb": 5000}


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [(0, []), (0x48, ["hw_slowdown", "hw_thermal_slowdown"]), (0x101, ["gpu_idle", "display_clock_setting"])],
)
def test_clock_reasons_are_named_by_their_bits(use, bits, reasons):
    """The fake library is one of before 535, which has the function under its old name."""
    use(FakeLibrary(reasons=bits))
    assert GpuSensors(0).read_clock_reasons() == reasons


@pytest.mark.parametrize(("visible", "opened"), [("3,1", 1), ("GPU-aa,GPU-bb", "GPU-bb"), ("", 1)])
def test_the_gpu_is_the_one_that_cuda_counts(use, monkeypatch, visible, opened):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = use(FakeLibrary())
    GpuSensors(1)
    assert library.opened == [opened]
