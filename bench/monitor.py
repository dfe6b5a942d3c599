"""What the machine did while something was measured: sampled in a thread, summed up, marked where it spoils figures.

GPUs are read through NVML, processors through psutil; where one of them is missing, the record says that its part was
not sampled.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self

from opal_deploy.bench.measurement import THROTTLED
from opal_deploy.runtime.devices import available_cpu_ids, parse_device
from opal_deploy.runtime.nvml import GpuSensors, NvmlError
from opal_deploy.statistics.intervals import percentile

INTERVAL = 0.1
BUSY = "busy"
# other processes may take so much of the processor before a run is marked
_BUSY_SHARE = 0.10
# over less time the system's counters, which tick every 10 ms, say nothing
_LEAST_SECONDS = 0.5

# reasons for lower clocks that somebody chose; all others slow a GPU down against its will
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "display_clock_setting")

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
    """One GPU, through NVML."""

    def __init__(self, sensors: GpuSensors, index: int, expected: str = "") -> None:
        """Watch a GPU.

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
        if total < _LEAST_SECONDS * len(available_cpu_ids()):
            return {}, ()
        others = max(0.0, (busy - ours) / total)
        marks = (f"{BUSY}: other processes took {others:.0%} of the CPU time",) if others > _BUSY_SHARE else ()
        return {"others_share": round(others, 4), "own_share": round(ours / total, 4)}, marks

    def _times(self) -> tuple[float, float, float]:
        """Seconds of the usable processors in all, those not idle, and those of this process and its own."""
        total = busy = 0.0
        usable = available_cpu_ids()
        for number, times in enumerate(self._psutil.cpu_times(percpu=True)):
            if number in usable:
                idle = times.idle + getattr(times, "iowait", 0.0)
                names = ("user", "nice", "system", "irq", "softirq", "steal")
                working = sum(getattr(times, name, 0.0) for name in names)
                total, busy = total + idle + working, busy + working
        own = self._process.cpu_times()
        # processes that this one started and that have ended, such as decode workers; not every system tells
        ended = getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
        return total, busy, own.user + own.system + ended


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


def _summary(values: list[float]) -> dict[str, float]:
    found = {"min": min(values), "median": percentile(values, 50), "max": max(values)}
    return {name: round(value, 2) for name, value in found.items()}
