"""The driver and its GPUs as NVML reports them: the real `pynvml` over a stand-in for the driver's C library."""

from __future__ import annotations

import pynvml
import pytest

from opal_deploy.runtime.nvml import Driver, Gpu, GpuSensors, NvmlError, read_driver

H200 = Gpu(0, "NVIDIA H200", 150_754_820_096, (9, 0))
NOT_SUPPORTED, GPU_IS_LOST = 3, 15


class FakeLibrary:
    """NVML's C functions as a machine with H200s answers them; each returns a status, 0 for success."""

    def __init__(self, count=1, lost=8, status=0, reasons=0):
        self.lost, self.status = lost, status
        self.opened = []
        self.nvmlErrorString = lambda code: b"Driver/library version mismatch"
        # functions that write one value to where their last argument points
        for name, value in {
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlDeviceGetCount_v2": count,
            "nvmlDeviceGetPowerUsage": 699_500,
            "nvmlDeviceGetTemperature": 88,
            "nvmlDeviceGetCurrentClocksThrottleReasons": reasons,  # its name before driver 535
        }.items():
            setattr(self, name, lambda *arguments, value=value: self.write(arguments[-1], value))

    def write(self, pointer, value):
        pointer._obj.value = value
        return 0

    def nvmlInitWithFlags(self, flags):
        return self.status

    def nvmlShutdown(self):
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.95.05"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        self.opened.append(index.value)
        return 0 if index.value < self.lost else GPU_IS_LOST

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.opened.append(uuid.value.decode())
        return 0

    def nvmlDeviceGetName(self, handle, text, size):
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total, memory._obj.used = H200.memory, 5_000_000_000
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        return self.write(major, H200.compute_capability[0]) or self.write(minor, H200.compute_capability[1])

    def nvmlDeviceGetClockInfo(self, handle, kind, megahertz):
        return NOT_SUPPORTED


@pytest.fixture
def use(monkeypatch):
    """Put a library in the place of the driver's."""

    def replace(library):
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

    def missing(name: str):
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
    use(FakeLibrary(reasons=bits))
    assert GpuSensors(0).read_clock_reasons() == reasons


@pytest.mark.parametrize(("visible", "opened"), [("3,1", 1), ("GPU-aa,GPU-bb", "GPU-bb"), ("", 1)])
def test_the_gpu_is_the_one_that_cuda_counts(use, monkeypatch, visible, opened):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = use(FakeLibrary())
    GpuSensors(1)
    assert library.opened == [opened]
