"""Drift of a served model: answers are counted in windows, which are compared with the baseline on request.

A request only pays for counting. Comparisons run in the thread of a request for /metrics or /drift.
"""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import UsageError, is_installed
from opal_deploy.records.drift import MIN_SAMPLE, DriftCounts
from opal_deploy.records.observations import observe_records
from opal_deploy.records.record import Answered
from opal_deploy.records.shifts import Kind, Limits, Shift

# records that are counted together
_BLOCK = 50
_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
# a window of n images has a false alarm with probability n divided by this, but at most `_MAX_Q`
IMAGES_PER_FALSE_ALARM = 10_000
_MAX_Q = 0.05


class WindowSize(NamedTuple):
    """The size of a window, in images or in seconds. Both None: there are no windows."""

    images: int | None
    seconds: float | None

    @staticmethod
    def parse(text: str) -> WindowSize:
        """Return the size that `500`, `6h` or `0` (no windows) stands for; raise UsageError for anything else."""
        match = re.fullmatch(r"(\d{1,9})([mhd]?)", text.strip())
        if match is None or (match[2] and int(match[1]) == 0):
            raise UsageError(
                f"--drift-window {text!r}: expected a number of images, or a duration such as 30m, 6h or 1d"
            )
        number = int(match[1])
        if match[2]:
            return WindowSize(None, number * _SECONDS[match[2]])
        if 0 < number < MIN_SAMPLE:
            raise UsageError(f"--drift-window {number}: at least {MIN_SAMPLE} images can be compared")
        return WindowSize(number or None, None)


@dataclass(frozen=True)
class Window:
    """The counts of a window, and when it began and ended (Unix time; `ended` is None while it is open)."""

    counts: DriftCounts
    began: float
    ended: float | None = None

    @property
    def limits(self) -> Limits:
        """The limits of a shift in a window of this many images."""
        return Limits(max_q=min(_MAX_Q, self.counts.images / IMAGES_PER_FALSE_ALARM))

    def compare(self) -> Comparison:
        """Compare the window with the baseline; without enough images, or without SciPy, there are no tests."""
        tests = self.counts.compare() if self.counts.images >= MIN_SAMPLE and is_installed("scipy") else []
        return Comparison(self, tests, self.limits.select(tests))


class Comparison(NamedTuple):
    """The comparison of a window with the baseline: all tests, and the shifts among them."""

    window: Window
    tests: list[Shift]
    shifts: list[Shift]

    def effect(self, kind: Kind) -> float:
        """Return the largest effect of a kind's shifts; 0 without any."""
        return max((shift.effect for shift in self.shifts if shift.kind == kind), default=0.0)

    def q(self, kind: Kind) -> float:
        """Return the smallest q-value of a kind's tests; 1 without any."""
        return min((test.q for test in self.tests if test.kind == kind), default=1.0)

    def to_dict(self, class_names: tuple[str, ...]) -> dict[str, Any]:
        """Return the comparison for JSON."""
        window = self.window
        return {
            "images": window.counts.images,
            "began": _format_time(window.began),
            "ended": None if window.ended is None else _format_time(window.ended),
            "compared": bool(self.tests),
            "max_q": window.limits.max_q,
            "min_effect": window.limits.min_effect,
            "shifts": [shift.to_dict(class_names) for shift in self.shifts],
        }


class DriftMonitor:
    """Counts the answers of one served model; its methods may be called from any thread.

    Attributes:
        windows: number of complete windows.
    """

    def __init__(
        self, metadata: Metadata, baseline: Baseline, size: WindowSize, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open the first window; `clock` measures durations, so that setting the machine's time changes no window."""
        self._metadata, self._size, self._clock = metadata, size, clock
        self._baseline, self._lock = baseline, threading.Lock()
        self._waiting: list[Answered] = []
        self._last: Window | None = None
        self._compared: Comparison | None = None
        self.windows = 0
        self._open()

    def count(self, record: Answered) -> None:
        """Count the record of an image with an answer."""
        with self._lock:
            self._close_if_due()
            self._waiting.append(record)
            images = self._current.counts.images + len(self._waiting)
            full = self._size.images is not None and images >= self._size.images
            if full or len(self._waiting) >= _BLOCK:
                self._flush()
            if full:
                self._close()

    def compare_last(self) -> Comparison | None:
        """Return the comparison of the last complete window; None before there is one."""
        with self._lock:
            self._close_if_due()
            window = self._last
        if window is not None and (self._compared is None or self._compared.window is not window):
            self._compared = window.compare()
        return None if window is None else self._compared

    def describe(self) -> dict[str, Any]:
        """Return the current and the last complete window with their shifts, for JSON."""
        last = self.compare_last()
        with self._lock:
            self._flush()
            current = copy.deepcopy(self._current)
        names = self._metadata.class_names
        return {
            "baseline_images": self._baseline.images,
            "windows": self.windows,
            "current": current.compare().to_dict(names),
            "last": None if last is None else last.to_dict(names),
        }

    def _open(self) -> None:
        self._current = Window(DriftCounts(self._baseline, self._metadata.class_map), time.time())
        self._until = None if self._size.seconds is None else self._clock() + self._size.seconds

    def _close_if_due(self) -> None:
        if self._until is not None and self._clock() >= self._until:
            self._flush()
            self._close()

    def _close(self) -> None:
        self._last = Window(self._current.counts, self._current.began, time.time())
        self.windows += 1
        self._open()

    def _flush(self) -> None:
        if self._waiting:
            max_slots = self._metadata.class_map.max_slots
            self._current.counts.add(observe_records(self._waiting, max_slots, self._metadata.grid))
            self._waiting = []


def open_monitor(metadata: Metadata, size: WindowSize) -> DriftMonitor | None:
    """Return the monitor of a model; None without windows, or if the model has no baseline of what records list."""
    # records of other heads list the strongest prototypes only
    baseline = metadata.known_baseline if metadata.is_opal else None
    if baseline is None or size == WindowSize(None, None):
        return None
    return DriftMonitor(metadata, baseline, size)


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
