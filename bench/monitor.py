"""What the machine did while something was measured: sampled in a thread, summed up, marked where it spoils figures.

GPUs tell through NVML (nvidia-ml-py), processors through psutil; without one of these packages the record says that its
part was not sampled.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, Self

from opal_deploy.bench.measurement import THROTTLED
from opal_deploy.statistics.intervals import percentile

INTERVAL = 0.1
BUSY = "busy"
# other processes may take so much of the processor before a run is marked
_BUSY_SHARE = 0.10
# over less time the system's counters, which tick every 10 ms, say nothing
_LEAST_SECONDS = 0.5

# NVML's reasons why clocks are not the highest (nvmlClocksEventReasons), by bit; the first two and the last are wishes,
# not needs
_REASONS = {
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
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "display_clock_setting")
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0

Samples = dict[str, list[float]]


class SampleSource(Protocol):
    """Something that can be sampled. Made when the run begins."""

    name: str

    def sample(self) -> dict[str, float]:
        """Figures of this moment; what cannot be read is left out."""
        ...

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What is known of the whole run besides the samples, and marks for the record."""
        ...


class GpuSource:
    """One GPU through NVML."""

    def __init__(self, nvml: Any, index: int, expected: str = "") -> None:
        """Args: nvml: the module `pynvml`; index: as CUDA counts; expected: the GPU's name as CUDA has it.

        Raises:
            NotSampled: NVML has no such GPU, or counts another one there.
        """
        self.name = f"cuda:{index}"
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = _handle(nvml, index)
            found = _text(nvml.nvmlDeviceGetName(self._handle))
        except nvml.NVMLError as error:
            raise SourceUnavailable(f"NVML: {error}") from None
        if expected and found != expected:
            raise SourceUnavailable(f"NVML's GPU {index} is {found}, CUDA's is {expected}")
        self._reasons: Counter[str] = Counter()
        self._samples = 0

    def sample(self) -> dict[str, float]:
        """Clocks, power, temperature, utilisation, memory; throttle reasons are counted."""
        nvml, handle = self._nvml, self._handle
        readers: dict[str, Callable[[], float]] = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_MEMORY),
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU),
            "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_used_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6,
        }
        found = {}
        for name, read in readers.items():
            try:
                found[name] = float(read())
            except nvml.NVMLError:
                continue
        try:
            # drivers before 535 know it by its old name
            ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            bits = int((ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))
        except nvml.NVMLError:
            return found
        self._samples += 1
        self._reasons.update(word for bit, word in _REASONS.items() if bits & bit)
        return found

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """In how many samples each reason held; a mark for those that slow a GPU down against its will."""
        marks = tuple(
            f"{THROTTLED}: {word} ({count} of {self._samples} samples)"
            for word, count in self._reasons.items()
            if word not in _HARMLESS
        )
        return {"clock_reasons": dict(self._reasons), "clock_reason_samples": self._samples}, marks


class CpuSource:
    """The processors that this process may use, and the process itself, through psutil."""

    name = "cpu"

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._process = psutil.Process()
        self._start = self._times()

    def sample(self) -> dict[str, float]:
        """Frequency and resident memory."""
        found = {"resident_mb": self._process.memory_info().rss / 1e6}
        # some systems do not tell, each in its own way
        with contextlib.suppress(OSError, NotImplementedError, AttributeError):
            if frequency := self._psutil.cpu_freq().current:
                found["frequency_mhz"] = float(frequency)
        return found

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What share of the processors' time others took; time that a hypervisor took away is others' too."""
        total, busy, ours = (now - then for now, then in zip(self._times(), self._start, strict=True))
        if total < _LEAST_SECONDS * self._cores():
            return {}, ()
        others = max(0.0, (busy - ours) / total)
        marks = (f"{BUSY}: other processes took {others:.0%} of the CPU time",) if others > _BUSY_SHARE else ()
        return {"others_share": round(others, 4), "own_share": round(ours / total, 4)}, marks

    def _times(self) -> tuple[float, float, float]:
        """Seconds of the usable processors in all, those not idle, and those of this process and its own."""
        total = busy = 0.0
        usable = _usable_cpus()
        for number, times in enumerate(self._psutil.cpu_times(percpu=True)):
            if usable is None or number in usable:
                idle = times.idle + getattr(times, "iowait", 0.0)
                names = ("user", "nice", "system", "irq", "softirq", "steal")
                working = sum(getattr(times, name, 0.0) for name in names)
                total, busy = total + idle + working, busy + working
        own = self._process.cpu_times()
        # processes that this one started and that have ended, such as decode workers; not every system tells
        ended = getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
        return total, busy, own.user + own.system + ended

    def _cores(self) -> int:
        usable = _usable_cpus()
        return len(usable) if usable is not None else (os.cpu_count() or 1)


class SourceUnavailable(Exception):
    """Why a source has nothing to tell."""


class Monitor:
    """Samples while its block runs.

    Attributes:
        conditions: afterwards, by source: smallest, median and largest of each figure, and what the source adds.
        marks: afterwards, what may spoil the figures.
    """

    def __init__(
        self, sources: Iterable[SampleSource], missing: dict[str, str] | None = None, *, interval: float = INTERVAL
    ) -> None:
        """Args: sources: what to sample; missing: sources that there are not, and why; interval: in seconds."""
        self.conditions: dict[str, Any] = {name: {"not_sampled": why} for name, why in (missing or {}).items()}
        self.marks: tuple[str, ...] = ()
        self._sources = list(sources)
        self._samples: dict[str, Samples] = {source.name: defaultdict(list) for source in self._sources}
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for source in self._sources:
            whole, marks = source.finish()
            sampled = {name: _summary(values) for name, values in self._samples[source.name].items()}
            self.conditions[source.name] = {**sampled, **whole}
            self.marks += marks

    def _work(self) -> None:
        while True:
            for source in self._sources:
                for name, value in source.sample().items():
                    self._samples[source.name][name].append(value)
            if self._stop.wait(self._interval):
                return


def monitor_devices(*devices: str) -> Monitor:
    """A monitor of this machine's processors, and of every GPU among the devices: `cuda:N`, or `cuda:N NAME`."""
    sources: list[SampleSource] = []
    missing: dict[str, str] = {}
    try:
        sources.append(CpuSource(_package("psutil", "psutil")))
    except SourceUnavailable as error:
        missing["cpu"] = str(error)
    for device in sorted(set(devices) - {"cpu"}):
        name, _, gpu = device.partition(" ")
        try:
            nvml = _package("pynvml", "nvidia-ml-py")
            sources.append(GpuSource(nvml, int(name.partition(":")[2] or 0), gpu))
        except SourceUnavailable as error:
            missing[name] = str(error)
    return Monitor(sources, missing)


def _package(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SourceUnavailable(f"{distribution} is not installed (pip install 'opal-deploy[bench]')") from None


def _handle(nvml: Any, index: int) -> Any:
    """NVML's handle for CUDA's device number: CUDA_VISIBLE_DEVICES renumbers them, and NVML does not know it."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    which = visible[index] if index < len(visible) else str(index)
    return nvml.nvmlDeviceGetHandleByIndex(int(which)) if which.isdigit() else nvml.nvmlDeviceGetHandleByUUID(which)


def _usable_cpus() -> set[int] | None:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS and Windows
        return None


def _summary(values: list[float]) -> dict[str, float]:
    found = {"min": min(values), "median": percentile(values, 50), "max": max(values)}
    return {name: round(value, 2) for name, value in found.items()}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
