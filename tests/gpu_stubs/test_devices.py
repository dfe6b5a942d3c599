"""Which GPU is used, what is said of one that cannot be, and what the driver reports."""

import ctypes

import pynvml
import pytest

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.runtime.cuda import Cuda, visible_driver
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.devices import Driver, Gpu, GpuSensors, read_driver
from opal_deploy.runtime.onnx_session import cuda_is_usable
from tests.gpu_stubs.test_sessions import blank

VERSIONS = ("580.95.05", (13, 0))
LOST = f"nvmlDeviceGetHandleByIndex@1={pynvml.NVML_ERROR_GPU_IS_LOST}"
DOCTOR = "from opal_deploy.cli import main; import sys; sys.argv = ['opal-deploy', 'doctor']; main()"


def h100(index):
    return Gpu(index, f"Stub H100 {index}", 80 << 30, (9, 0))


def test_a_gpu_that_does_not_answer_hides_no_other_and_none_gets_a_context(gpu):
    gpu.set(devices=3)
    assert visible_driver() == Driver(*VERSIONS, (h100(0), h100(1), h100(2)))
    assert Cuda(2, "gpu").uuid == "02" * 16
    gpu.set(errors="cudaGetDeviceProperties@0=46")
    driver = visible_driver()
    assert driver.gpus == (h100(1), h100(2))
    assert driver.problem.startswith("device cuda:0: ")
    assert gpu.calls("cudaSetDevice") == []


def test_a_session_uses_its_own_gpu_alone_and_leaves_the_callers_current(gpu, model):
    gpu.set(devices=2)
    session = open_onnx_session(model, device="cuda:1")
    session.run(blank(8))
    assert {call[-2:] for call in gpu.calls("cudaMalloc")} == {"@1"}
    # no context was made on the one that nobody uses
    assert {call.split()[1] for call in gpu.calls("cudaSetDevice")} == {"1"}
    gpu.library.cudaSetDevice(0)
    session.run(blank(8))
    current = ctypes.c_int()
    gpu.library.cudaGetDevice(ctypes.byref(current))
    assert current.value == 0


def test_auto_takes_the_first_gpu_and_a_missing_or_reserved_one_is_refused(gpu, model):
    gpu.set(devices=2)
    session = open_onnx_session(model, device="auto")
    assert (session.device, "the GPU is not used" in session.description) == ("cuda:0", False)
    with pytest.raises(UsageError, match="device cuda:3: CUDA sees 2 GPUs"):
        open_onnx_session(model, device="cuda:3")
    gpu.set(errors="cudaSetDevice@1=46")
    with pytest.raises(UsageError, match=r"cuda:1: .* busy or unavailable: .* \(sudo nvidia-smi -c 0\)"):
        open_onnx_session(model, device="cuda:1")


def test_a_failed_call_has_cudas_text(gpu):
    gpu.set(errors="cudaMalloc@0=719")
    with pytest.raises(StoppedEarly, match=r"CUDA device 0: cudaMalloc failed: unspecified launch failure \(719\)"):
        Cuda(0, "gpu").allocate(8)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"STUB_DRIVER": "12040"}, "driver 550.54.15 runs CUDA 12.4 at most, and this needs 13.0; update"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES='7' hides every GPU; unset"),
        ({"STUB_ERRORS": "cudaGetDeviceCount@0=999 cuInit@0=999"}, "container, set NVIDIA_DRIVER_CAPABILITIES"),
    ],
)
def test_auto_takes_the_cpu_and_says_why_as_doctor_does(gpu, model, monkeypatch, run_process, settings, reason):
    assert cuda_is_usable()
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    session = open_onnx_session(model, device="auto")
    assert session.device == "cpu"
    assert "fp32 (the GPU is not used: " in session.description
    assert reason in session.description
    with pytest.raises(UsageError, match="use --device cpu") as refused:
        open_onnx_session(model, device="cuda")
    assert reason in str(refused.value)
    assert len(session.run(blank(2))) == 2
    # with the real cuda-bindings
    assert reason.replace("; ", ": ") in " ".join(run_process(DOCTOR, **settings).stdout.split())


@pytest.mark.parametrize(
    ("settings", "driver"),
    [
        ({}, Driver(*VERSIONS, (h100(0),))),
        (
            {"devices": 2, "errors": LOST},
            Driver(*VERSIONS, (h100(0),), "GPU 1 does not answer (lost, or no permission)"),
        ),
        ({"devices": 0}, Driver(*VERSIONS, problem="the NVIDIA driver lists no GPU")),
        (
            {"errors": "nvmlInit@0=18"},
            Driver(problem="the NVIDIA driver does not answer: Driver/library version mismatch (18)"),
        ),
    ],
)
def test_the_driver_is_read(gpu, settings, driver):
    gpu.set(**settings)
    assert read_driver() == driver


def test_sensors_leave_out_what_the_gpu_does_not_report(gpu):
    assert GpuSensors(0).read() == {"power_watts": 699.5, "temperature_celsius": 88, "memory_used_mb": 5000}
    assert GpuSensors(0).read_clock_reasons() == ["hw_slowdown", "hw_thermal_slowdown"]


@pytest.mark.parametrize(("visible", "index"), [("3,1", 1), ("GPU-0,GPU-2", 2), ("", 1)])
def test_the_gpu_is_the_one_that_cuda_counts(gpu, monkeypatch, visible, index):
    gpu.set(devices=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GpuSensors(1).name == h100(index).name
