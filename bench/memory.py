"""Resident memory over a run: is it flat?"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

POINTS = 60
# samples after the first quarter that a slope needs
_ENOUGH = 8
# a rise of more than 5 % and 10 MB after the first quarter is growth, less is what allocators do
_SHARE, _MEGABYTES = 0.05, 10.0


@dataclass(frozen=True)
class MemoryCurve:
    """Samples of a process's resident memory.

    Attributes:
        seconds, megabytes: when, and how many MB of 2^20 bytes; at least one sample.
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
        """MB a second after the first quarter of the time, by least squares; None with too few samples."""
        seconds, megabytes = self._settled()
        if len(seconds) < _ENOUGH:
            return None
        return float(np.polyfit(seconds - seconds[0], megabytes, 1)[0])

    @property
    def rise(self) -> float | None:
        """MB by which the fitted line rises after the first quarter."""
        slope = self.slope
        seconds, _ = self._settled()
        return None if slope is None else slope * float(seconds[-1] - seconds[0])

    @property
    def grows(self) -> bool:
        """Whether the memory is not flat: it rises by more than 5 % and 10 MB after the first quarter."""
        return (self.rise or 0.0) > max(_SHARE * self.start, _MEGABYTES)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: at most POINTS samples, the first and the last among them."""
        count = len(self.seconds)
        kept = sorted({round(i) for i in np.linspace(0, count - 1, min(POINTS, count))})
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

    def line(self) -> str:
        """For a person."""
        told = f"memory {self.start:.0f} MB at the start, {self.end:.0f} at the end, peak {self.peak:.0f}"
        if self.rise is None:
            return f"{told}; too short for a trend"
        return f"{told}; {'GROWING' if self.grows else 'flat'}: {self.rise:+.1f} MB after the first quarter"

    def _settled(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        seconds, megabytes = np.asarray(self.seconds), np.asarray(self.megabytes)
        after = seconds >= seconds[0] + (seconds[-1] - seconds[0]) / 4
        return seconds[after], megabytes[after]


def release_memory() -> None:
    """Return what was freed to the system, where its C library can: the next peak is not to be of memory kept idle."""
    gc.collect()
    # glibc's alone
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class MemorySampler:
    """Samples this process's resident memory every `interval` seconds while its block runs, in a thread."""

    def __init__(self, interval: float = 0.1) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._seconds: list[float] = []
        self._megabytes: list[float] = []

    @property
    def curve(self) -> MemoryCurve:
        """What was sampled."""
        return MemoryCurve(tuple(self._seconds), tuple(self._megabytes))

    def __enter__(self) -> MemorySampler:
        import psutil

        self._process = psutil.Process()
        self._started = time.perf_counter()
        self._sample()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        self._seconds.append(time.perf_counter() - self._started)
        self._megabytes.append(self._process.memory_info().rss / 2**20)
