"""Which GPU is used, and what is said of one that cannot be."""

import ctypes

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.runtime.cuda import visible_driver
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.onnx_session import cuda_is_usable
from tests.gpu_stubs.test_sessions import images


def test_all_gpus_are_listed_although_one_is_reserved_and_none_gets_a_context(gpu):
    gpu.set(devices=3, errors="cudaSetDevice@1=46 computeMode@1=3")
    assert [(each.index, each.compute_mode) for each in visible_driver().gpus] == [
        (0, "default"), (1, "exclusive"), (2, "default"),
    ]  # fmt: skip
    gpu.set(errors="cudaGetDeviceProperties@0=46")
    assert [each.index for each in visible_driver().gpus] == [1, 2]
    assert gpu.calls("cudaSetDevice") == []


def test_a_session_runs_on_its_own_gpu_and_leaves_the_callers_current(gpu, model):
    gpu.set(devices=2)
    gpu.library.cudaSetDevice(0)
    session = open_onnx_session(model, device="cuda:1")
    before = len(gpu.calls("cudaMalloc"))
    assert {call.device for call in gpu.calls("cudaMalloc")} == {1}
    session.run(images(8))
    assert {call.device for call in gpu.calls("cudaMalloc")[before:]} == {1}
    assert current_device(gpu) == 0
    session.close()


def test_auto_takes_the_first_gpu_that_is_free(gpu, model):
    gpu.set(devices=3, errors="computeMode@0=2 cudaSetDevice@0=46 computeMode@1=3 cudaSetDevice@1=46 computeMode@2=3")
    assert open_onnx_session(model, device="auto").device == "cuda:2"
    assert {call.text for call in gpu.calls("cudaSetDevice")} == {"cudaSetDevice 2"}


def test_a_gpu_that_nobody_uses_gets_no_context(gpu, model):
    gpu.set(devices=2)
    open_onnx_session(model, device="cuda:1").run(images(8))
    assert {call.text for call in gpu.calls("cudaSetDevice")} == {"cudaSetDevice 1"}


def current_device(gpu):
    device = ctypes.c_int()
    gpu.library.cudaGetDevice(ctypes.byref(device))
    return device.value


def test_a_reserved_gpu_is_refused_in_one_line(gpu, model):
    gpu.set(errors="cudaSetDevice@0=46 computeMode@0=3")
    with pytest.raises(UsageError, match=r"cuda:0: .* busy or unavailable: .* \(sudo nvidia-smi -c 0\)"):
        open_onnx_session(model, device="cuda")


UNUSABLE = [
    pytest.param(
        {"driver": 12040}, "driver 550.54.15 runs CUDA 12.4 at most, and this needs 13.0; update", id="driver"
    ),
    pytest.param({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides every GPU; unset", id="hidden"),
    pytest.param({"errors": "computeMode@0=2 cudaSetDevice@0=46"}, "sudo nvidia-smi -c 0", id="prohibited"),
    pytest.param({"errors": "computeMode@0=3 cudaSetDevice@0=46"}, "sudo nvidia-smi -c 0", id="exclusive"),
    pytest.param(
        {"errors": "migMode@0=1 cudaGetDeviceCount@0=100"},
        "the GPU is in MIG mode and has no instance; create one",
        id="MIG",
    ),
    pytest.param({"errors": "cudaGetDeviceCount@0=999"}, "CUDA does not start", id="unknown"),
]


@pytest.mark.parametrize(("settings", "reason"), UNUSABLE)
def test_auto_takes_the_cpu_and_says_why(gpu, model, monkeypatch, settings, reason):
    assert cuda_is_usable()
    for name, value in settings.items():
        monkeypatch.setenv(name if name.isupper() else f"STUB_{name.upper()}", str(value))
    session = open_onnx_session(model, device="auto")
    assert session.device == "cpu"
    assert "fp32 (the GPU is not used: " in session.description
    assert reason in session.description
    with pytest.raises(UsageError, match="use --device cpu") as refused:
        open_onnx_session(model, device="cuda")
    assert reason in str(refused.value)
    assert len(session.run(images(2))) == 2


DOCTOR = "from opal_deploy.cli import main; import sys; sys.argv = ['opal-deploy', 'doctor']; main()"


@pytest.mark.parametrize(("settings", "reason"), UNUSABLE[:3])
def test_the_real_cuda_bindings_and_doctor_agree(run_process, settings, reason):
    assert reason.replace("; ", ": ") in " ".join(run_process(DOCTOR, **settings).stderr.split())
