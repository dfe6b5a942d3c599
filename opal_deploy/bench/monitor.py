"""Sample the machine while a benchmark runs: GPUs through NVML, CPUs and memory through psutil.

`monitor_devices` returns a `Monitor`. It samples in a thread while its block runs, summarises the samples for
`Measurement.conditions`, and marks what may distort the figures: throttled GPUs, other processes on the CPUs. A missing
source is recorded as not sampled. `MemorySampler` records the curve of resident memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, Self

import numpy as np

from opal_deploy.bench.measurement import THROTTLED
from opal_deploy.errors import install_command
from opal_deploy.runtime.devices import GpuSensors, NvmlError, available_cpu_ids, parse_device

INTERVAL = 0.1
BUSY = "busy"
MAX_POINTS = 60
# share of the CPU time that other processes may take before a run is marked
_BUSY_SHARE = 0.10
# the system's counters tick every 10 ms and are too coarse for less CPU time than this
_MIN_SECONDS = 0.5
# memory samples after the first quarter that a slope needs
_MIN_SAMPLES = 8
# a rise of more than 5 % and 10 MB after the first quarter is growth; less is normal for allocators
_GROWTH_SHARE, _GROWTH_MEGABYTES = 0.05, 10.0
# reasons for lower clocks that were chosen; all others are throttling
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "display_clock_setting")


class Sampler(ABC):
    """Calls `sample` at the start of its block and then every `interval` seconds, in a thread."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @abstractmethod
    def sample(self) -> None:
        """Take one sample."""

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.sample()


class GpuSource:
    """One GPU, through NVML."""

    def __init__(self, sensors: GpuSensors, index: int, expected: str = "") -> None:
        """Prepare to sample the GPU with CUDA's number `index`, which CUDA names `expected` (empty: unknown).

        Raises:
            NvmlError: NVML has another GPU under that number.
        """
        if expected and sensors.name != expected:
            raise NvmlError(f"GPU {index} is {sensors.name}, CUDA's is {expected}")
        self.name = f"cuda:{index}"
        self._sensors = sensors
        self._reasons: list[list[str]] = []

    def sample(self) -> dict[str, float]:
        """Return clocks, power, temperature, utilisation and memory; note the reasons for lower clocks."""
        reasons = self._sensors.read_clock_reasons()
        self._reasons += [] if reasons is None else [reasons]
        return self._sensors.read()

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the number of samples with each reason for lower clocks, and a mark for each that throttles."""
        counts, samples = Counter(chain.from_iterable(self._reasons)), len(self._reasons)
        throttling = {reason: count for reason, count in counts.items() if reason not in _HARMLESS}
        marks = (f"{THROTTLED}: {reason} ({count} of {samples} samples)" for reason, count in throttling.items())
        return {"clock_reasons": dict(counts), "clock_reason_samples": samples}, tuple(marks)


class CpuSource:
    """The CPUs that this process may use, and the process itself, through psutil."""

    name = "cpu"

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._process = psutil.Process()
        self._start = self._cpu_seconds()

    def sample(self) -> dict[str, float]:
        """Return frequency and resident memory."""
        readings = {"resident_mb": self._process.memory_info().rss / 1e6}
        # systems without a frequency fail in different ways
        with contextlib.suppress(OSError, NotImplementedError, AttributeError):
            if frequency := self._psutil.cpu_freq().current:
                readings["frequency_mhz"] = float(frequency)
        return readings

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the shares of CPU time of this process and of others, which includes time lost to a hypervisor."""
        total, busy, own = (now - then for now, then in zip(self._cpu_seconds(), self._start, strict=True))
        if total < _MIN_SECONDS * len(available_cpu_ids()):
            return {}, ()
        others = max(0.0, (busy - own) / total)
        marks = (f"{BUSY}: other processes took {others:.0%} of the CPU time",) if others > _BUSY_SHARE else ()
        return {"others_share": round(others, 4), "own_share": round(own / total, 4)}, marks

    def _cpu_seconds(self) -> tuple[float, float, float]:
        """Return total and busy seconds of the usable CPUs, and the seconds of this process and its ended children."""
        usable = available_cpu_ids()
        cores = [each for number, each in enumerate(self._psutil.cpu_times(percpu=True)) if number in usable]
        idle, busy = (
            sum(getattr(each, name, 0.0) for each in cores for name in names)
            for names in (("idle", "iowait"), ("user", "nice", "system", "irq", "softirq", "steal"))
        )
        own = self._process.cpu_times()
        # ended children, such as decode workers; not every system reports them
        children = getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
        return idle + busy, busy, own.user + own.system + children


Source = GpuSource | CpuSource


class Monitor(Sampler):
    """Samples several sources while its block runs.

    Attributes:
        conditions: by source, complete after the block: min, median and max of each reading, and what the source adds.
        marks: reasons to doubt the figures, complete after the block.
    """

    def __init__(
        self, sources: Iterable[Source], missing: dict[str, str] | None = None, *, interval: float = INTERVAL
    ) -> None:
        """Prepare to sample the sources every `interval` seconds; `missing` names unavailable ones with the reason."""
        super().__init__(interval)
        self.conditions: dict[str, Any] = {name: {"not_sampled": reason} for name, reason in (missing or {}).items()}
        self.marks: tuple[str, ...] = ()
        self._sources = list(sources)
        self._samples: dict[str, dict[str, list[float]]] = {source.name: defaultdict(list) for source in self._sources}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for source in self._sources:
            whole_run, marks = source.finish()
            readings = {name: _summarise(values) for name, values in self._samples[source.name].items()}
            self.conditions[source.name] = {**readings, **whole_run}
            self.marks += marks

    def sample(self) -> None:
        """Take one sample of every source."""
        for source in self._sources:
            for name, value in source.sample().items():
                self._samples[source.name][name].append(value)


def monitor_devices(*devices: str) -> Monitor:
    """Return a monitor of this machine's CPUs and of the GPUs among the devices: `cpu`, `cuda:N` or `cuda:N NAME`."""
    sources: list[Source] = []
    missing: dict[str, str] = {}
    try:
        import psutil

        sources.append(CpuSource(psutil))
    except ImportError:
        missing["cpu"] = f"psutil is not installed ({install_command('bench')})"
    for device in sorted(set(devices) - {"cpu"}):
        name, _, gpu = device.partition(" ")
        try:
            index = parse_device(name)[1]
            sources.append(GpuSource(GpuSensors(index), index, gpu))
        except NvmlError as error:
            missing[name] = f"NVML: {error}"
    return Monitor(sources, missing)


def _summarise(values: list[float]) -> dict[str, float]:
    summary = {"min": min(values), "median": median(values), "max": max(values)}
    return {name: round(value, 2) for name, value in summary.items()}


@dataclass(frozen=True)
class MemoryCurve:
    """Samples of a process's resident memory: seconds from the start, and units of 2^20 bytes."""

    seconds: tuple[float, ...]
    megabytes: tuple[float, ...]

    @property
    def rise(self) -> float | None:
        """MB by which a least-squares line rises after the first quarter of the time; None with too few samples."""
        seconds, megabytes = np.asarray(self.seconds), np.asarray(self.megabytes)
        after = seconds >= seconds[0] + (seconds[-1] - seconds[0]) / 4
        if after.sum() < _MIN_SAMPLES:
            return None
        slope = np.polyfit(seconds[after] - seconds[0], megabytes[after], 1)[0]
        return float(slope * (seconds[-1] - seconds[after][0]))

    @property
    def grows(self) -> bool:
        """Whether the memory rises by more than 5 % and 10 MB after the first quarter."""
        return (self.rise or 0.0) > max(_GROWTH_SHARE * self.megabytes[0], _GROWTH_MEGABYTES)

    def to_dict(self) -> dict[str, Any]:
        """Return at most MAX_POINTS samples for JSON, the first and the last among them, and the trend."""
        count = len(self.seconds)
        kept = sorted({round(i) for i in np.linspace(0, count - 1, min(MAX_POINTS, count))})
        return {
            "seconds": [round(self.seconds[i], 3) for i in kept],
            "megabytes": [round(self.megabytes[i], 2) for i in kept],
            "samples": count,
            "start": self.megabytes[0],
            "end": self.megabytes[-1],
            "peak": max(self.megabytes),
            "rise_after_first_quarter": self.rise,
        }

    def describe(self) -> str:
        """Return one line for a person."""
        start, end, peak = self.megabytes[0], self.megabytes[-1], max(self.megabytes)
        text = f"memory {start:.0f} MB at the start, {end:.0f} at the end, peak {peak:.0f}"
        if self.rise is None:
            return f"{text}; too short for a trend"
        return f"{text}; {'GROWING' if self.grows else 'flat'}: {self.rise:+.1f} MB after the first quarter"


class MemorySampler(Sampler):
    """Samples this process's resident memory while its block runs: at both ends and every `interval` seconds."""

    def __init__(self, interval: float = 0.1) -> None:
        import psutil

        super().__init__(interval)
        self._process = psutil.Process()
        self._started = 0.0
        self._seconds: list[float] = []
        self._megabytes: list[float] = []

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.sample()

    def sample(self) -> None:
        """Add one sample to the curve."""
        self._seconds.append(time.perf_counter() - self._started)
        self._megabytes.append(self._process.memory_info().rss / 2**20)

    @property
    def curve(self) -> MemoryCurve:
        """The samples so far."""
        return MemoryCurve(tuple(self._seconds), tuple(self._megabytes))


def peak_memory_mb() -> float:
    """Return the largest resident memory of this process since its start or `reset_peak_memory`, in 2^20 bytes.

    Reads /proc if it exists: `getrusage` of a child process includes its parent's memory at the fork.
    """
    try:
        with open("/proc/self/status") as stream:
            return next(int(line.split()[1]) / 1024 for line in stream if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak_memory() -> None:
    """Restart `peak_memory_mb` if the system can; elsewhere it stays the peak of the whole process."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
