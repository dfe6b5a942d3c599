"""`opal-deploy doctor`: each machine that it can meet, and what it says there."""

import json
from dataclasses import replace

import pytest

from opal_deploy.cli.doctor import doctor
from opal_deploy.errors import UsageError
from opal_deploy.runtime import cuda, devices, diagnostics
from opal_deploy.runtime.devices import Driver, Gpu

DRIVER = Driver("580.95.05", (13, 0), (Gpu(0, "NVIDIA H200", 150_754_820_096, (9, 0)),))
NO_DRIVER = Driver(problem="no NVIDIA driver found (libnvidia-ml.so.1)")
P100 = replace(DRIVER, gpus=(Gpu(0, "Tesla P100", None, (6, 0)),))
H200 = DRIVER.gpus[0]
# answers of onnxruntime
CPU_ONLY = {"version": "1.31.1", "providers": ["CPUExecutionProvider"], "problem": ""}
CUDA = CPU_ONLY | {"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
LOST_CUBLAS = {**CUDA, "problem": "libcublas.so.13: cannot open shared object file"}
CRASH = {"problem": "cannot be imported: it crashed with signal 11"}


@pytest.fixture
def machine(monkeypatch):
    """Put these distributions, this driver and this answer of onnxruntime in the place of the machine's."""

    def make(*installed, driver=NO_DRIVER, answer=None):
        versions = dict(entry.split("==") for entry in installed)
        modules = {name.removesuffix("-gpu").removesuffix("-cu13").replace("-", "_") for name in versions}
        if "tensorrt-cu13-libs==11.4" in installed:
            modules |= {"tensorrt_libs", "tensorrt_bindings"}
        monkeypatch.setattr(devices, "read_driver", lambda: driver)
        monkeypatch.setattr(
            diagnostics, "installed_version", lambda *names: next((versions[n] for n in names if n in versions), None)
        )
        monkeypatch.setattr(diagnostics, "is_installed", lambda module: module in modules)
        monkeypatch.setattr(diagnostics, "query_onnxruntime", lambda: answer)
        monkeypatch.setattr(cuda, "start_cuda", lambda: (0, "no error"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


@pytest.fixture
def document(capsys):
    """Return what `doctor --json` writes, and the entry of one runtime."""

    def read(runtime=None):
        doctor(as_json=True)
        written = capsys.readouterr()
        assert written.err == ""
        answer = json.loads(written.out)
        return answer, next((fact for fact in answer["runtimes"] if fact["name"] == runtime), None)

    return read


GPU_ONLY = ("onnxruntime-gpu==1.31.1",)
ANY_CPU, ANY_GPU = "pip install 'opal-deploy[cpu]'", "pip install 'opal-deploy[gpu]'"
NOTHING = {"cpu": ANY_CPU, "gpu": ANY_GPU, "any": ANY_CPU}
DEVICES = ("cpu", "gpu", "any")
CRASHED = dict.fromkeys(DEVICES, "crashed with signal 11")


@pytest.mark.parametrize(
    ("installed", "driver", "answer", "refusals"),
    [
        pytest.param((), NO_DRIVER, None, NOTHING, id="nothing installed"),
        pytest.param(("onnxruntime==1",), NO_DRIVER, CPU_ONLY, {"gpu": "pip uninstall"}, id="a CPU box"),
        pytest.param(GPU_ONLY, DRIVER, CUDA, {}, id="a GPU server"),
        pytest.param(GPU_ONLY, NO_DRIVER, CUDA, {"gpu": "no NVIDIA driver found"}, id="no driver"),
        pytest.param(GPU_ONLY, DRIVER, LOST_CUBLAS, {"gpu": "libcublas.so.13"}, id="a CUDA library is missing"),
        pytest.param(GPU_ONLY, P100, CUDA, {"gpu": "compute capability 7.5"}, id="an old GPU"),
        pytest.param(GPU_ONLY, DRIVER, CRASH, CRASHED, id="the import crashes"),
        pytest.param((*GPU_ONLY, "onnxruntime==1"), DRIVER, CPU_ONLY, {"gpu": "no CUDA provider"}, id="both packages"),
    ],
)  # fmt: skip
def test_a_device_is_usable_or_refused_in_one_line(machine, document, installed, driver, answer, refusals):
    machine(*installed, driver=driver, answer=answer)
    assert document()[0]["usable"] == {device: device not in refusals for device in DEVICES}
    for device in DEVICES:
        if device not in refusals:
            doctor(require=device)
            continue
        with pytest.raises(UsageError) as refusal:
            doctor(require=device)
        assert refusals[device] in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_both_onnxruntimes_are_a_warning_in_the_document_that_comes_before_a_refusal(machine, capsys):
    machine("onnxruntime==1.31.1", *GPU_ONLY, driver=NO_DRIVER, answer=CUDA)
    with pytest.raises(UsageError):
        doctor(as_json=True, require="gpu")
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "overwrite each other's files" in warning
    assert "pip uninstall --yes onnxruntime onnxruntime-gpu" in warning


ALONE, LIBS = ("tensorrt-cu13==11.4",), ("tensorrt-cu13==11.4", "tensorrt-cu13-libs==11.4")


@pytest.mark.parametrize(
    ("installed", "driver", "problem"),
    [
        pytest.param((*LIBS, "cuda.bindings==13"), DRIVER, "", id="a GPU server"),
        pytest.param(ALONE, DRIVER, "incomplete", id="no libraries"),
        pytest.param(LIBS, DRIVER, "cuda-bindings", id="no device memory"),
        pytest.param(LIBS, NO_DRIVER, "neither builds nor runs", id="no GPU"),
    ],
)
def test_tensorrt_is_usable_where_all_of_it_is_there(machine, document, installed, driver, problem):
    machine(*installed, driver=driver)
    answer, fact = document("tensorrt")
    assert fact["gpu"] is answer["usable"]["gpu"] is not bool(problem)
    assert problem in fact["problem"]
    assert bool(fact["problem"]) is bool(fact["advice"]) is bool(problem)


@pytest.fixture
def fake_onnxruntime(tmp_path, monkeypatch):
    def write(source):
        (tmp_path / "onnxruntime").mkdir()
        (tmp_path / "onnxruntime" / "__init__.py").write_text(source, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


@pytest.mark.parametrize(
    ("source", "timeout", "problem"),
    [
        pytest.param("import os; os.abort()", 60, "cannot be imported: it crashed with signal 6", id="crash"),
        pytest.param("raise ImportError('GLIBC_2.38 not found')", 60, "GLIBC_2.38 not found", id="error"),
        pytest.param("import os; print('banner'); os._exit(0)", 60, "does not say what it is", id="no answer"),
        pytest.param("import time; time.sleep(60)", 1, "timed out", id="hangs"),
    ],
)
def test_a_broken_onnxruntime_is_an_answer(fake_onnxruntime, source, timeout, problem):
    fake_onnxruntime(source)
    answer = diagnostics.query_onnxruntime(timeout)
    assert set(answer) == {"problem"}
    assert problem in answer["problem"]


def test_an_onnxruntime_that_prints_is_understood_and_files_in_the_working_directory_are_not_imported(
    fake_onnxruntime, tmp_path, monkeypatch
):
    providers = "def get_available_providers():\n    return ['CPUExecutionProvider']\n"
    fake_onnxruntime("print('a banner', end='')\n__version__ = '9.9'\n" + providers)
    answer = diagnostics.query_onnxruntime()
    assert answer == {"version": "9.9", "providers": ["CPUExecutionProvider"], "problem": ""}
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    assert diagnostics.query_onnxruntime() != answer
