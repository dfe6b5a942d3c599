"""The driver and its GPUs as NVML reports them, over stand-ins for the functions of `pynvml`."""

from types import SimpleNamespace

import pynvml
import pytest

from opal_deploy.runtime.devices import Driver, Gpu, GpuSensors, NvmlError, has_vnni, read_driver

H200 = Gpu(0, "NVIDIA H200", 150_754_820_096, (9, 0))


def fail(code):
    def function(*_):
        raise pynvml.NVMLError(code)

    return function


@pytest.fixture
def answer(monkeypatch):
    """Let NVML answer as on a machine with one H200, and with what is given; return the GPUs that were opened."""
    opened = []

    def use(*, lost=8, **answers):
        def open_gpu(name):
            opened.append(name)
            return name if name != lost else fail(pynvml.NVML_ERROR_GPU_IS_LOST)()

        usual = {
            "Init": None, "Shutdown": None, "ErrorString": "Driver/library version mismatch",
            "SystemGetDriverVersion": "580.95.05", "SystemGetCudaDriverVersion_v2": 13000, "DeviceGetCount": 1,
            "DeviceGetHandleByIndex": open_gpu, "DeviceGetHandleByUUID": open_gpu, "DeviceGetName": H200.name,
            "DeviceGetMemoryInfo": SimpleNamespace(total=H200.memory, used=5_000_000_000),
            "DeviceGetCudaComputeCapability": (9, 0), "DeviceGetPowerUsage": 699_500, "DeviceGetTemperature": 88,
            "DeviceGetClockInfo": fail(pynvml.NVML_ERROR_NOT_SUPPORTED),
            "DeviceGetUtilizationRates": fail(pynvml.NVML_ERROR_NOT_SUPPORTED),
        }  # fmt: skip
        for name, value in {**usual, **answers}.items():
            monkeypatch.setattr(pynvml, f"nvml{name}", value if callable(value) else lambda *_, value=value: value)
        return opened

    return use


@pytest.mark.parametrize(
    ("answers", "driver"),
    [
        pytest.param({}, Driver("580.95.05", (13, 0), (H200,)), id="one GPU"),
        pytest.param(
            {"DeviceGetCount": 2, "lost": 1},
            Driver("580.95.05", (13, 0), (H200,), "GPU 1 does not answer (lost, or no permission)"),
            id="a lost GPU does not hide the other",
        ),
        pytest.param(
            {"DeviceGetCount": 0}, Driver("580.95.05", (13, 0), problem="the NVIDIA driver lists no GPU"), id="no GPU"
        ),
        pytest.param(
            {"Init": fail(18)},
            Driver(problem="the NVIDIA driver does not answer: Driver/library version mismatch (18)"),
            id="a driver that does not start",
        ),
    ],
)
def test_the_driver_is_read(answer, answers, driver):
    answer(**answers)
    assert read_driver() == driver


def test_without_a_driver_the_missing_library_is_named(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    assert read_driver() == Driver(problem="no NVIDIA driver found (libnvidia-ml.so.1)")
    with pytest.raises(NvmlError, match="Not Found"):
        GpuSensors(0)


def test_sensors_leave_out_what_the_gpu_does_not_report(answer):
    answer(DeviceGetCurrentClocksEventReasons=0x48)
    assert GpuSensors(0).read() == {"power_watts": 699.5, "temperature_celsius": 88, "memory_used_mb": 5000}
    assert GpuSensors(0).read_clock_reasons() == ["hw_slowdown", "hw_thermal_slowdown"]


@pytest.mark.parametrize(("visible", "opened"), [("3,1", 1), ("GPU-aa,GPU-bb", "GPU-bb"), ("", 1)])
def test_the_gpu_is_the_one_that_cuda_counts(answer, monkeypatch, visible, opened):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = answer()
    GpuSensors(1)
    assert found == [opened]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", True),
        ("flags : avx2 avx512f\nnote : avx512_vnni\n", False),
        (None, False),
    ],
)
def test_a_processor_with_vnni_is_told_by_its_flags(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert has_vnni(tmp_path / "cpuinfo") is expected
