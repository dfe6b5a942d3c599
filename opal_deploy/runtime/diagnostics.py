"""The runtimes installed on this machine: which can run inference, on which devices, and how to fix the others.

Nothing here imports torch or a runtime into this process: onnxruntime is imported in a child process, so that a broken
installation becomes one status among others.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opal_deploy.errors import install_command, is_installed
from opal_deploy.runtime.cuda import diagnose_gpu
from opal_deploy.runtime.devices import Driver

# what inference may be required to run on
RequiredDevice = Literal["cpu", "gpu", "any"]
# what was never seen working; `doctor` prints it, and nothing may claim more
NEVER_RUN = (
    "TensorRT, its lean runtime and TensorRT for RTX: our tests build engines of the last; none ever ran on hardware",
)

# a TensorRT consists of three distributions, and pip leaves the first in place where NVIDIA's own index was not used
_TENSORRT_PARTS = ("", "_bindings", "_libs")

_ONNXRUNTIME_PROGRAM = """
import ctypes, json, os, sys
import onnxruntime as ort
providers = ort.get_available_providers()
problem = ""
if "CUDAExecutionProvider" in providers:
    try:
        # last on the path: nothing next to opal_deploy may be imported instead of what is installed
        sys.path.append(sys.argv[1])
        from opal_deploy.runtime.cuda import load_cuda_libraries
        load_cuda_libraries()
        folder = os.path.join(os.path.dirname(ort.__file__), "capi")
        ctypes.CDLL(os.path.join(folder, "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(os.path.join(folder, "libonnxruntime_providers_cuda.so"))
    except Exception as error:
        problem = str(error)
print("\\n" + json.dumps({"version": ort.__version__, "providers": providers, "problem": problem}))
"""


@dataclass(frozen=True)
class RuntimeStatus:
    """One runtime that can be installed, by the name of its distribution for pip.

    `version` is None if it is not installed; `cpu` and `gpu` tell whether `infer` can use it there, `problem` why not
    and `advice` what to do, each in one line; `providers` are onnxruntime's execution providers.
    """

    name: str
    version: str | None
    cpu: bool = False
    gpu: bool = False
    problem: str = ""
    advice: str = ""
    providers: tuple[str, ...] = ()

    def usable(self, device: RequiredDevice) -> bool:
        """Return whether inference can run on a device with this runtime."""
        return {"cpu": self.cpu, "gpu": self.gpu, "any": self.cpu or self.gpu}[device]


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first installed distribution of these, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def query_onnxruntime(timeout: float = 60) -> dict[str, Any]:
    """Import onnxruntime in a child process and return its `version`, `providers`, and why CUDA does not load.

    If the import fails or takes more than `timeout` seconds, only `problem` is returned.
    """
    command = [sys.executable, "-P", "-c", _ONNXRUNTIME_PROGRAM, str(Path(__file__).parents[2])]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
        if child.returncode < 0:
            return {"problem": f"cannot be imported: it crashed with signal {-child.returncode}"}
        if child.returncode > 0:
            lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
            return {"problem": f"cannot be imported: {lines[-1]}"}
        report: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": f"cannot be imported: {error}"}
    except (IndexError, ValueError):
        return {"problem": f"does not say what it is: {child.stdout[-80:]!r}"}
    return report


def _inspect_onnxruntime(driver: Driver) -> list[RuntimeStatus]:
    cpu, gpu = installed_version("onnxruntime"), installed_version("onnxruntime-gpu")
    if cpu is None and gpu is None:
        return [
            RuntimeStatus(name, None, problem="not installed", advice=install_command(extra))
            for name, extra in (("onnxruntime", "cpu"), ("onnxruntime-gpu", "gpu"))
        ]
    report = query_onnxruntime()
    providers = tuple(report.get("providers", ()))
    broken, on_cpu = "" if providers else report["problem"], "CPUExecutionProvider" in providers
    if cpu is None:
        first = RuntimeStatus("onnxruntime", None, problem="not installed; onnxruntime-gpu stands in for it")
    else:
        again = install_command("cpu", instead_of="onnxruntime") if broken else ""
        first = RuntimeStatus("onnxruntime", cpu, on_cpu, False, broken, again, providers)
    if gpu is None:
        advice = install_command("gpu", instead_of="onnxruntime")
        return [first, RuntimeStatus("onnxruntime-gpu", None, problem="not installed", advice=advice)]
    problem, advice = broken, install_command("gpu", instead_of="onnxruntime-gpu")
    if not broken and "CUDAExecutionProvider" not in providers:
        problem = "has no CUDA provider"
    elif not broken:
        problem, advice = diagnose_gpu(driver)
        if not problem and report["problem"]:
            problem, advice = f"its CUDA libraries do not load: {report['problem']}", install_command("gpu")
    return [first, RuntimeStatus("onnxruntime-gpu", gpu, on_cpu, not problem, problem, advice, providers)]


def tensorrt_version(name: str) -> str | None:
    """Return the version of `tensorrt` or its like if all of its parts are installed, without importing it."""
    modules = [name.replace("-", "_") + part for part in _TENSORRT_PARTS]
    version = installed_version(f"{name}-cu13", name)
    return version if version and all(map(is_installed, modules)) else None


def _inspect_tensorrt(name: str, extra: str, driver: Driver) -> RuntimeStatus:
    version, install = installed_version(f"{name}-cu13", name), install_command(extra)
    if name == "tensorrt":
        install += " --extra-index-url \"$NVIDIA_INDEX\" (NVIDIA's package index: TensorRT's installation guide has it)"
    if version is None:
        use = "engines of export --lean" if name == "tensorrt-lean" else "export --trt and engines"
        return RuntimeStatus(name, None, problem=f"not installed; {use} use it", advice=install)
    if tensorrt_version(name) is None:
        return RuntimeStatus(name, version, problem="incomplete: its bindings or libraries are missing", advice=install)
    problem, advice = diagnose_gpu(driver)
    if problem:
        without_gpu = "builds engines here" if name == "tensorrt-rtx" else "neither builds nor runs engines here"
        return RuntimeStatus(name, version, problem=f"{without_gpu}; {problem}", advice=advice)
    if not is_installed("cuda.bindings"):
        return RuntimeStatus(name, version, problem="its memory needs cuda-bindings, not installed", advice=install)
    return RuntimeStatus(name, version, gpu=True)


def inspect_runtimes(driver: Driver) -> list[RuntimeStatus]:
    """Return the status of every runtime, installed or not, the most useful first."""
    return [
        *_inspect_onnxruntime(driver),
        _inspect_special("openvino", "openvino", "for --runtime openvino"),
        _inspect_tensorrt("tensorrt", "trt", driver),
        _inspect_tensorrt("tensorrt-lean", "trt-lean", driver),
        _inspect_tensorrt("tensorrt-rtx", "trt-rtx", driver),
        _inspect_special("torch", "train,export", "for training, exporting and checkpoints"),
    ]


def _inspect_special(name: str, extra: str, purpose: str) -> RuntimeStatus:
    """Return the status of a runtime that `infer` does not choose by itself."""
    version = installed_version(name)
    if version is None:
        return RuntimeStatus(name, None, problem=f"not installed; {purpose}", advice=install_command(extra))
    return RuntimeStatus(name, version, problem=purpose)


def find_conflicts() -> list[str]:
    """Return one line for each set of packages that must not be installed together, with what to do."""
    if installed_version("onnxruntime") and installed_version("onnxruntime-gpu"):
        return [
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            f"{install_command('gpu', instead_of='onnxruntime onnxruntime-gpu')} or 'opal-deploy[cpu]'"
        ]
    return []
