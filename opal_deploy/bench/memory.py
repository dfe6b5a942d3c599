"""Resident memory of this process: its peak, and a curve over a run that shows whether it grows."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from opal_deploy.bench.monitor import Sampler

MAX_POINTS = 60
# samples after the first quarter that a slope needs
_MIN_SAMPLES = 8
# a rise of more than 5 % and 10 MB after the first quarter is growth; less is normal for allocators
_GROWTH_SHARE, _GROWTH_MEGABYTES = 0.05, 10.0


@dataclass(frozen=True)
class MemoryCurve:
    """Samples of a process's resident memory.

    Attributes:
        seconds: time of each sample, from the start; at least one.
        megabytes: resident memory of each sample, in units of 2^20 bytes.
    """

    seconds: tuple[float, ...]
    megabytes: tuple[float, ...]

    @property
    def start(self) -> float:
        """The first sample, MB."""
        return self.megabytes[0]

    @property
    def end(self) -> float:
        """The last sample, MB."""
        return self.megabytes[-1]

    @property
    def peak(self) -> float:
        """The largest sample, MB."""
        return max(self.megabytes)

    @property
    def slope(self) -> float | None:
        """MB per second after the first quarter of the time, by least squares; None with too few samples."""
        seconds, megabytes = self._after_first_quarter()
        if len(seconds) < _MIN_SAMPLES:
            return None
        return float(np.polyfit(seconds - seconds[0], megabytes, 1)[0])

    @property
    def rise(self) -> float | None:
        """MB by which the fitted line rises after the first quarter; None with too few samples."""
        slope = self.slope
        seconds, _ = self._after_first_quarter()
        return None if slope is None else slope * float(seconds[-1] - seconds[0])

    @property
    def grows(self) -> bool:
        """Whether the memory rises by more than 5 % and 10 MB after the first quarter."""
        return (self.rise or 0.0) > max(_GROWTH_SHARE * self.start, _GROWTH_MEGABYTES)

    def to_dict(self) -> dict[str, Any]:
        """Return at most MAX_POINTS samples for JSON, the first and the last among them, and the trend."""
        count = len(self.seconds)
        kept = sorted({round(i) for i in np.linspace(0, count - 1, min(MAX_POINTS, count))})
        return {
            "seconds": [round(self.seconds[i], 3) for i in kept],
            "megabytes": [round(self.megabytes[i], 2) for i in kept],
            "samples": count,
            "start": self.start,
            "end": self.end,
            "peak": self.peak,
            "slope_mb_per_second": self.slope,
            "rise_after_first_quarter": self.rise,
        }

    def describe(self) -> str:
        """Return one line for a person."""
        text = f"memory {self.start:.0f} MB at the start, {self.end:.0f} at the end, peak {self.peak:.0f}"
        if self.rise is None:
            return f"{text}; too short for a trend"
        return f"{text}; {'GROWING' if self.grows else 'flat'}: {self.rise:+.1f} MB after the first quarter"

    def _after_first_quarter(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        seconds, megabytes = np.asarray(self.seconds), np.asarray(self.megabytes)
        after = seconds >= seconds[0] + (seconds[-1] - seconds[0]) / 4
        return seconds[after], megabytes[after]


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

    Read from /proc where there is one: `getrusage` of a child process counts its parent's memory at the fork.
    """
    try:
        with open("/proc/self/status") as stream:
            return next(int(line.split()[1]) / 1024 for line in stream if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak_memory() -> None:
    """Let `peak_memory_mb` start again where the system can; elsewhere it stays the peak of the whole process."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")


def release_memory() -> None:
    """Return freed memory to the system where the C library can, so that the next peak does not include it."""
    gc.collect()
    # glibc alone has it
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
