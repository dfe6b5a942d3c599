"""The devices of this machine: CPUs that the process may use, device names, the NVIDIA driver and its GPUs.

A device name is `auto`, `cpu`, `cuda` or `cuda:N`; a list of GPUs may be written as numbers, such as `0,1`.

The driver is read by NVML (NVIDIA Management Library) through nvidia-ml-py (module `pynvml`), which is pure Python and
loads the driver's library on the first call: neither CUDA nor torch is imported. NVML numbers GPUs by PCI bus and
ignores CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.runtime.session import Session

# default batch sizes
CPU_BATCH, GPU_BATCH = 8, 64
T = TypeVar("T")
LIBRARY = "libnvidia-ml.so.1"
NO_GPU_ADVICE = "install the NVIDIA driver (in a container: docker run --gpus all)"

# why a GPU's clocks are not the highest (nvmlClocksEventReasons), by bit
_CLOCK_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def available_cpus() -> int:
    """Return the number of CPUs that this process may use: the smaller of its affinity and its container's quota."""
    quota = read_cpu_quota()
    return len(available_cpu_ids()) if quota is None else max(1, min(len(available_cpu_ids()), math.ceil(quota)))


def read_cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the CPUs that control groups (v1 or v2, nested) let this process use at a time; None for no limit."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = root / "cpu" if controllers else root
            inner = Path(path.lstrip("/"))
            # in a container the group's own files lie at the root
            for folder in {base, *(base / part for part in (inner, *inner.parents))}:
                limits += _read_quota(folder)
    return min(limits, default=None)


def _read_quota(folder: Path) -> list[float]:
    """Return a control group's CPUs; none without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text("ascii").split()
        return [] if quota == "max" else [int(quota) / int(period)]
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
        return [int(quota) / int(period)] if int(quota) > 0 else []
    return []


def has_vnni(path: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies int8 without saturation (VNNI or AMX); False where that is not known."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:  # not on macOS and Windows
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(flags)


def available_cpu_ids() -> set[int]:
    """Return the CPUs that this process may use, by their numbers; all of them where the system has no affinity."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS and Windows
        return set(range(os.cpu_count() or 1))


def parse_device(device: str) -> tuple[str, int]:
    """Return a device name's kind (`auto`, `cpu` or `cuda`) and number, 0 by default; UsageError for another name."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
        raise UsageError(f"device {device!r}: expected auto, cpu, cuda or cuda:N")
    return kind, int(number or 0)


def split_devices(devices: str) -> list[str]:
    """Return one device name per session: numbers become `cuda:N`, a name stays.

    Raises:
        UsageError: neither a device name nor a list of different numbers.
    """
    if devices.split(":")[0] in ("auto", "cpu", "cuda"):
        return [devices]
    numbers = devices.split(",")
    if not all(number.isdigit() for number in numbers) or len(set(numbers)) != len(numbers):
        raise UsageError(f"device {devices!r}: expected auto, cpu, cuda, cuda:N, or numbers such as 0,1")
    return [f"cuda:{number}" for number in numbers]


def default_batch(session: Session) -> int:
    """Return the default batch size for the device of a session."""
    return CPU_BATCH if session.device == "cpu" else GPU_BATCH


def default_workers(cores: int | None = None) -> int:
    """Return the default number of decode workers: all cores but two, at least two of them.

    Two cores are left to the sessions' threads and to the thread that builds and writes records.
    """
    cores = cores or available_cpus()
    return max(cores - 2, min(cores, 2))


@dataclass(frozen=True)
class Gpu:
    """One GPU: its number from 0, the driver's name for it such as `NVIDIA H200`, and its compute capability.

    Attributes:
        memory: in bytes; None where the driver does not report it (shared memory, MIG).
    """

    index: int
    name: str
    memory: int | None
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this machine.

    Attributes:
        version: such as `580.95.05`; None without a driver.
        cuda: the newest CUDA (major, minor) that the driver runs.
        gpus: the GPUs that answer.
        problem: what is wrong, in one line; empty if nothing is.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


class NvmlError(Exception):
    """NVML cannot read a GPU; the message is NVML's own."""


def read_driver() -> Driver:
    """Return the driver and its GPUs. Never raises: what went wrong is in `Driver.problem`."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return Driver(problem=f"no NVIDIA driver found ({LIBRARY})")
    except pynvml.NVMLError as error:
        code = int(error.value)
        # the driver's own text says more than the package's, unless it is a stub of the library
        text = _read(lambda: pynvml.nvmlErrorString(code)) or str(pynvml.NVMLError(code))
        return Driver(problem=f"the NVIDIA driver does not answer: {text} ({code})")
    try:
        return _read_gpus()
    finally:
        pynvml.nvmlShutdown()


def find_gpu_problem() -> str:
    """Return why there is no NVIDIA GPU here and what to do, for the end of an error; empty where there is one."""
    driver = read_driver()
    return "" if driver.gpus else f"{driver.problem}; {NO_GPU_ADVICE}, or use --device cpu"


def _read_gpus() -> Driver:
    import pynvml

    version = _read(pynvml.nvmlSystemGetDriverVersion)
    number = _read(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    cuda = None if number is None else (number // 1000, number % 1000 // 10)
    gpus, lost = [], []
    for index in range(_read(pynvml.nvmlDeviceGetCount) or 0):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, capability = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        except pynvml.NVMLError:
            lost.append(str(index))
            continue
        memory = _read(functools.partial(pynvml.nvmlDeviceGetMemoryInfo, handle))
        gpus.append(Gpu(index, name, memory and int(memory.total), (capability[0], capability[1])))
    problem = f"GPU {', '.join(lost)} does not answer (lost, or no permission)" if lost else ""
    return Driver(version, cuda, tuple(gpus), problem or ("" if gpus else "the NVIDIA driver lists no GPU"))


def _read(function: Callable[[], T]) -> T | None:
    """Return what an NVML function reports, or None where the driver does not support it."""
    import pynvml

    try:
        return function()
    except pynvml.NVMLError:
        return None


class GpuSensors:
    """Clocks, power, temperature, utilisation and memory use of one GPU; `name` is the driver's name for it."""

    def __init__(self, index: int) -> None:
        """Open a GPU by CUDA's number, with CUDA_VISIBLE_DEVICES applied; NvmlError without a driver or such a GPU."""
        import pynvml

        self._nvml = pynvml
        visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        name = visible[index] if index < len(visible) else str(index)
        try:
            pynvml.nvmlInit()
            if name.isdigit():
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            self.name: str = pynvml.nvmlDeviceGetName(self._handle)
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from None

    def read(self) -> dict[str, float]:
        """Return the present readings by name, with units; readings that the GPU does not report are left out."""
        nvml, handle = self._nvml, self._handle
        readings: dict[str, Callable[[], float]] = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_used_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6,
        }
        values = {name: _read(function) for name, function in readings.items()}
        return {name: float(value) for name, value in values.items() if value is not None}

    def read_clock_reasons(self) -> list[str] | None:
        """Return the reasons for which the clocks are not at their highest; None where the GPU does not report them."""
        bits = _read(lambda: int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)))
        return None if bits is None else [name for bit, name in _CLOCK_REASONS.items() if bits & bit]
