"""Sample the machine while a benchmark runs: GPUs through NVML, CPUs through psutil.

`monitor_devices` returns a `Monitor`. It samples in a thread while its block runs, summarises the samples for
`Measurement.conditions`, and marks what may distort the figures: throttled GPUs, other processes on the CPUs. A missing
source is recorded as not sampled. `Sampler` is the thread alone; `bench.memory` samples resident memory with it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Protocol, Self

from opal_deploy.bench.measurement import THROTTLED
from opal_deploy.runtime.devices import available_cpu_ids, parse_device
from opal_deploy.runtime.nvml import GpuSensors, NvmlError
from opal_deploy.statistics import percentile

INTERVAL = 0.1
BUSY = "busy"
# share of the CPU time that other processes may take before a run is marked
_BUSY_SHARE = 0.10
# the system's counters tick every 10 ms and are too coarse for less CPU time than this
_MIN_SECONDS = 0.5
# reasons for lower clocks that somebody chose; all others slow a GPU down against its will
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


class SampleSource(Protocol):
    """A device to sample, made when the run begins."""

    name: str

    def sample(self) -> dict[str, float]:
        """Return the present readings by name; what cannot be read is left out."""
        ...

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return what is known of the whole run besides the samples, and marks for the measurement."""
        ...


class SourceUnavailable(Exception):
    """A source cannot be sampled; the message says why."""


class GpuSource:
    """One GPU, through NVML."""

    def __init__(self, sensors: GpuSensors, index: int, expected: str = "") -> None:
        """Prepare to sample a GPU.

        Args:
            sensors: of the GPU.
            index: CUDA's number of the GPU.
            expected: the GPU's name as CUDA reports it; empty if unknown.

        Raises:
            SourceUnavailable: NVML has another GPU under that number.
        """
        if expected and sensors.name != expected:
            raise SourceUnavailable(f"NVML's GPU {index} is {sensors.name}, CUDA's is {expected}")
        self.name = f"cuda:{index}"
        self._sensors = sensors
        self._reasons: Counter[str] = Counter()
        self._samples = 0

    def sample(self) -> dict[str, float]:
        """Return clocks, power, temperature, utilisation and memory; count the reasons for lower clocks."""
        reasons = self._sensors.read_clock_reasons()
        if reasons is not None:
            self._samples += 1
            self._reasons.update(reasons)
        return self._sensors.read()

    def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the number of samples with each reason for lower clocks, and a mark for each that throttles."""
        marks = tuple(
            f"{THROTTLED}: {reason} ({count} of {self._samples} samples)"
            for reason, count in self._reasons.items()
            if reason not in _HARMLESS
        )
        return {"clock_reasons": dict(self._reasons), "clock_reason_samples": self._samples}, marks


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
        """Return the shares of CPU time that this process and others took; time lost to a hypervisor is others'."""
        total, busy, own = (now - then for now, then in zip(self._cpu_seconds(), self._start, strict=True))
        if total < _MIN_SECONDS * len(available_cpu_ids()):
            return {}, ()
        others = max(0.0, (busy - own) / total)
        marks = (f"{BUSY}: other processes took {others:.0%} of the CPU time",) if others > _BUSY_SHARE else ()
        return {"others_share": round(others, 4), "own_share": round(own / total, 4)}, marks

    def _cpu_seconds(self) -> tuple[float, float, float]:
        """Return total and busy seconds of the usable CPUs, and the seconds of this process and its ended children."""
        total = busy = 0.0
        usable = available_cpu_ids()
        for number, times in enumerate(self._psutil.cpu_times(percpu=True)):
            if number in usable:
                idle = times.idle + getattr(times, "iowait", 0.0)
                names = ("user", "nice", "system", "irq", "softirq", "steal")
                working = sum(getattr(times, name, 0.0) for name in names)
                total, busy = total + idle + working, busy + working
        own = self._process.cpu_times()
        # ended children, such as decode workers; not every system reports them
        children = getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
        return total, busy, own.user + own.system + children


class Monitor(Sampler):
    """Samples several sources while its block runs.

    Attributes:
        conditions: by source, complete after the block: min, median and max of each reading, and what the source adds.
        marks: reasons to doubt the figures, complete after the block.
    """

    def __init__(
        self, sources: Iterable[SampleSource], missing: dict[str, str] | None = None, *, interval: float = INTERVAL
    ) -> None:
        """Prepare to sample.

        Args:
            sources: what to sample.
            missing: sources that cannot be sampled, with the reason.
            interval: seconds between samples.
        """
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
    sources: list[SampleSource] = []
    missing: dict[str, str] = {}
    try:
        import psutil

        sources.append(CpuSource(psutil))
    except ImportError:
        missing["cpu"] = "psutil is not installed (pip install 'opal-deploy[bench]')"
    for device in sorted(set(devices) - {"cpu"}):
        name, _, gpu = device.partition(" ")
        try:
            index = parse_device(name)[1]
            sources.append(GpuSource(GpuSensors(index), index, gpu))
        except NvmlError as error:
            missing[name] = f"NVML: {error}"
        except SourceUnavailable as error:
            missing[name] = str(error)
    return Monitor(sources, missing)


def _summarise(values: list[float]) -> dict[str, float]:
    summary = {"min": min(values), "median": percentile(values, 50), "max": max(values)}
    return {name: round(value, 2) for name, value in summary.items()}
