"""What this machine can run inference on: the NVIDIA driver, its GPUs and the installed runtimes.

Nothing here imports torch, and nothing imports a runtime into this process: onnxruntime is asked in a child process, so
that a broken installation becomes a line of the answer instead of the end of it. GPUs are read from NVML, the library
that comes with the driver, through ctypes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NVML = "libnvidia-ml.so.1"
# the lowest compute capability that each CUDA major version has kernels for
OLDEST_GPU = {12: (5, 0), 13: (7, 5)}
# what nobody has seen working yet: `doctor` prints it, and nothing may claim more
NEVER_RUN = (
    "CUDA session: never run on hardware",
    "TensorRT and TensorRT for RTX: engines of the latter are built in our tests; none was ever run on hardware",
)

_ASK_ONNXRUNTIME = """
import ctypes, json, os
import onnxruntime as ort
providers = ort.get_available_providers()
problem = ""
if "CUDAExecutionProvider" in providers:
    try:
        ort.preload_dlls()
        folder = os.path.join(os.path.dirname(ort.__file__), "capi")
        ctypes.CDLL(os.path.join(folder, "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(os.path.join(folder, "libonnxruntime_providers_cuda.so"))
    except Exception as error:
        problem = str(error)
answer = {"version": ort.__version__, "providers": providers, "problem": problem}
answer["cuda"] = str(getattr(ort, "cuda_version", "") or "")
print()
print(json.dumps(answer))
"""


class Device(StrEnum):
    """What inference can be asked to run on."""

    cpu = "cpu"
    gpu = "gpu"
    any = "any"


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML lists it; `memory` in bytes, None where the driver does not tell (shared memory, MIG)."""

    index: int
    name: str
    memory: int | None
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: version, newest CUDA (major, minor) that it runs, GPUs, and what is wrong with it."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class RuntimeFact:
    """One runtime that can be installed.

    Attributes:
        name: the distribution, as `pip` calls it.
        version: None if it is not installed.
        cpu, gpu: whether everything is here that `infer` needs to use it on that device.
        problem: why not, in one line; empty if nothing is wrong.
        advice: what to do about it.
        providers: onnxruntime's execution providers.
    """

    name: str
    version: str | None
    cpu: bool = False
    gpu: bool = False
    problem: str = ""
    advice: str = ""
    providers: tuple[str, ...] = ()

    def usable(self, device: Device) -> bool:
        return {Device.cpu: self.cpu, Device.gpu: self.gpu, Device.any: self.cpu or self.gpu}[device]


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """Ask NVML for the driver and its GPUs. Never raises: what went wrong is in `problem`."""
    try:
        nvml = load(NVML)
    except OSError:
        return Driver(problem=f"no NVIDIA driver found ({NVML})")
    try:
        status = nvml.nvmlInit_v2()
        if status != 0:
            nvml.nvmlErrorString.restype = ctypes.c_char_p
            reason = (nvml.nvmlErrorString(status) or b"").decode(errors="replace")
            return Driver(problem=f"the NVIDIA driver does not answer: {reason or 'NVML error'} ({status})")
        try:
            return _ask_driver(nvml)
        finally:
            nvml.nvmlShutdown()
    except AttributeError as error:  # a symbol is missing: a driver of before 2012, or a stub of the library
        return Driver(problem=f"{NVML} is not usable: {error}")


def _ask_driver(nvml: Any) -> Driver:
    text = ctypes.create_string_buffer(96)
    number, minor = ctypes.c_int(), ctypes.c_int()
    count = ctypes.c_uint()
    version = text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, 96) == 0 else None
    cuda = None
    if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0:
        cuda = (number.value // 1000, number.value % 1000 // 10)
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return Driver(version, cuda, problem="the NVIDIA driver does not list its GPUs")
    found, silent = [], []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _Memory()
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0
            or nvml.nvmlDeviceGetName(device, text, 96) != 0
            or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(number), ctypes.byref(minor)) != 0
        ):
            silent.append(str(index))
            continue
        told = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
        name = text.value.decode(errors="replace")
        found.append(Gpu(index, name, memory.total if told else None, (number.value, minor.value)))
    problem = f"GPU {', '.join(silent)} does not answer (lost, or no permission)" if silent else ""
    return Driver(version, cuda, tuple(found), problem or ("" if found else "the NVIDIA driver lists no GPU"))


def gpus() -> list[Gpu]:
    """The GPUs of this machine; empty without a driver."""
    return list(read_driver().gpus)


def installed(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_importable(module: str) -> bool:
    """Whether a package is there, without importing it; an empty folder left behind does not count."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None


def query_onnxruntime(timeout: float = 60) -> dict[str, Any]:
    """Import onnxruntime in a child process: version, providers, cuda, problem (why its CUDA libraries do not load).

    If the import itself fails, the answer is `{"problem": ...}` alone.
    """
    return _ask(_ASK_ONNXRUNTIME, timeout=timeout)


def _ask(program: str, *arguments: str, timeout: float = 60) -> dict[str, Any]:
    """What a program prints as JSON in its last line, run in a child process; `{"problem": ...}` where it fails."""
    command = [sys.executable, "-P", "-c", program, *arguments]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": f"cannot be imported: {error}"}
    if child.returncode < 0:
        return {"problem": f"cannot be imported: it crashed with signal {-child.returncode}"}
    if child.returncode > 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        return {"problem": f"cannot be imported: {lines[-1]}"}
    try:
        answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"problem": f"does not say what it is: {child.stdout[-80:]!r}"}
    return answer


def _why_not_cuda(answer: dict[str, Any], driver: Driver) -> tuple[str, str]:
    """Why this onnxruntime cannot use a GPU here, and what to do; two empty strings if nothing is in the way."""
    if "CUDAExecutionProvider" not in answer["providers"]:
        return "has no CUDA provider", "pip install --force-reinstall 'opal-deploy[gpu]'"
    digits = answer["cuda"].partition(".")[0]
    problem = _why_no_gpu(driver, int(digits) if digits.isdigit() else 13)
    if problem[0]:
        return problem
    if "libcuda.so" in answer["problem"]:
        needed = "set NVIDIA_DRIVER_CAPABILITIES=compute,utility for the container, or reinstall the NVIDIA driver"
        return f"the driver's CUDA library does not load: {answer['problem']}", needed
    if answer["problem"]:
        return f"its CUDA libraries do not load: {answer['problem']}", "pip install 'opal-deploy[gpu]'"
    return "", ""


def _why_no_gpu(driver: Driver, major: int) -> tuple[str, str]:
    """Why no GPU here runs programs made for a CUDA version, and what to do; two empty strings if one does."""
    if not driver.gpus:
        return driver.problem, "install the NVIDIA driver (in a container: docker run --gpus all)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    if driver.cuda and driver.cuda[0] < major:
        newest = ".".join(map(str, driver.cuda))
        return f"driver {driver.version} runs CUDA {newest} at most, and this needs {major}", "update the NVIDIA driver"
    oldest = OLDEST_GPU.get(major, (0, 0))
    if all(gpu.compute_capability < oldest for gpu in driver.gpus):
        names = ", ".join(gpu.name for gpu in driver.gpus)
        needed = ".".join(map(str, oldest))
        return f"CUDA {major} needs compute capability {needed} or newer, and this is {names}", "use the CPU"
    return "", ""


def _onnxruntime(driver: Driver) -> list[RuntimeFact]:
    cpu, gpu = installed("onnxruntime"), installed("onnxruntime-gpu")
    wanted = "pip install 'opal-deploy[gpu]'" + ("" if driver.gpus else ", on a machine with an NVIDIA GPU")
    absent_cpu = RuntimeFact("onnxruntime", None, problem="not installed", advice="pip install 'opal-deploy[cpu]'")
    absent_gpu = RuntimeFact("onnxruntime-gpu", None, problem="not installed", advice=wanted)
    if cpu is None and gpu is None and not is_importable("onnxruntime"):
        return [absent_cpu, absent_gpu]
    answer = query_onnxruntime()
    providers = tuple(answer.get("providers", ()))
    broken = "" if providers else answer["problem"]
    on_cpu = "CPUExecutionProvider" in providers
    facts = []
    if cpu is not None or gpu is None:  # an import without a known distribution: somebody's own build
        version = cpu or answer.get("version", "of unknown origin")
        again = "pip install --force-reinstall 'opal-deploy[cpu]'" if broken else ""
        on_gpu = "CUDAExecutionProvider" in providers and _why_not_cuda(answer, driver) == ("", "")
        facts.append(RuntimeFact("onnxruntime", version, on_cpu, on_gpu, broken, again, providers))
        first = f"pip uninstall --yes onnxruntime, then {wanted}"
        absent_gpu = RuntimeFact("onnxruntime-gpu", None, problem="not installed", advice=first)
    if gpu is None:
        return [*facts, absent_gpu]
    if broken:
        problem, advice = broken, "pip install --force-reinstall 'opal-deploy[gpu]'"
    else:
        problem, advice = _why_not_cuda(answer, driver)
    fact = RuntimeFact("onnxruntime-gpu", gpu, on_cpu, not problem, problem, advice, providers)
    if not facts:
        facts.append(RuntimeFact("onnxruntime", None, problem="not installed; onnxruntime-gpu stands in for it"))
    return [*facts, fact]


def installed_tensorrt(name: str, module: str) -> str | None:
    """The version of TensorRT (`tensorrt`) or TensorRT for RTX (`tensorrt-rtx`), if all of its parts are installed."""
    version = installed(*_distributions(name))
    return version if version and all(is_importable(module + part) for part in _PARTS) else None


def cuda_major_of(name: str) -> int:
    """The CUDA major version that the installed distribution of a TensorRT is made for; 13 where nothing tells."""
    for distribution in _distributions(name):
        if installed(distribution):
            return 12 if distribution.endswith("-cu12") else 13
    return 13


def _distributions(name: str) -> tuple[str, ...]:
    return (f"{name}-cu13", name, f"{name}-cu12")


# a TensorRT consists of three distributions, and pip leaves the first in place where NVIDIA's own index was not asked
_PARTS = ("", "_bindings", "_libs")

_ASK_TENSORRT = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
print()
print(json.dumps({"version": module.__version__}))
"""


def _tensorrt(name: str, module: str, extra: str, driver: Driver) -> RuntimeFact:
    version = installed(*_distributions(name))
    install = f"pip install 'opal-deploy[{extra}]'"
    if name == "tensorrt":
        install += " --extra-index-url \"$NVIDIA_INDEX\" (NVIDIA's package index: TensorRT's installation guide has it)"
    if version is None:
        return RuntimeFact(name, None, problem="not installed; export --trt and engines use it", advice=install)
    if not all(is_importable(module + part) for part in _PARTS):
        return RuntimeFact(name, version, problem="incomplete: its bindings or libraries are missing", advice=install)
    answer = _ask(_ASK_TENSORRT, module)
    if answer.get("problem"):
        return RuntimeFact(name, version, problem=answer["problem"], advice=f"reinstall it: {install}")
    without_gpu = "builds engines here" if name == "tensorrt-rtx" else "neither builds nor runs engines here"
    problem, advice = _why_no_gpu(driver, cuda_major_of(name))
    if problem:
        return RuntimeFact(name, version, problem=f"{without_gpu}; {problem}", advice=advice)
    if not is_importable("cuda.bindings"):
        return RuntimeFact(name, version, problem="its memory needs cuda-bindings, not installed", advice=install)
    return RuntimeFact(name, version, gpu=True)


def runtimes(driver: Driver | None = None) -> list[RuntimeFact]:
    """Every runtime, installed or not, in the order in which it is worth installing."""
    driver = read_driver() if driver is None else driver
    facts = _onnxruntime(driver)
    facts.append(_tensorrt("tensorrt", "tensorrt", "trt", driver))
    facts.append(_tensorrt("tensorrt-rtx", "tensorrt_rtx", "trt-rtx", driver))
    torch = installed("torch")
    if torch is None:
        problem, advice = "not installed; training and exporting need it", "pip install 'opal-deploy[train,export]'"
        facts.append(RuntimeFact("torch", None, problem=problem, advice=advice))
    else:
        facts.append(RuntimeFact("torch", torch, problem="for training and exporting; infer does not use it"))
    return facts


def conflicts() -> list[str]:
    """What is installed side by side and must not be, each with what to do."""
    if installed("onnxruntime") and installed("onnxruntime-gpu"):
        return [
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "pip uninstall --yes onnxruntime onnxruntime-gpu, then pip install 'opal-deploy[gpu]' or 'opal-deploy[cpu]'"
        ]
    return []
