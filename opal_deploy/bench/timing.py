"""Time one call repeatedly: a warm-up that is discarded and counted, then repeats of many iterations each.

`random_batches` makes the inputs: several batches of noise, so that no call finds its input in the CPU's cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.runtime.session import ImageBatch
from opal_deploy.statistics import spread

Call = Callable[[int], object]
Clock = Callable[[], int]

# the first calls compile, choose kernels and record CUDA graphs (sessions with three sets of buffers once for each):
# their time is no warm-up
_FIRST_CALLS = 3
# the warm-up ends when the last few calls differ by no more than this
_STABLE_CALLS, _STABLE_SPREAD = 5, 0.10
# a machine that never becomes stable gets the least warm-up this many times over
_MAX_WARM_UP_FACTOR = 5


@dataclass(frozen=True)
class TimingOptions:
    """The length and number of timed calls.

    Attributes:
        seconds: least length of a repeat.
        iterations: least calls of a repeat.
        repeats: how often; the spread is between repeats.
        warm_up_seconds: least length of the warm-up.
        buffers: batches of noise that the calls rotate over.
        seed: of the noise.
        report: is called after each repeat.
    """

    seconds: float = 3.0
    iterations: int = 10
    repeats: int = 3
    warm_up_seconds: float = 1.0
    buffers: int = 4
    seed: int = 0
    report: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class WarmUp:
    """The discarded calls: their number, their seconds, and whether the last few took equally long."""

    calls: int
    seconds: float
    stable: bool


@dataclass(frozen=True)
class Timing:
    """The time of every call.

    Attributes:
        repeats: one array a repeat, float64 [iterations]: seconds of each call.
        elapsed: seconds of each repeat as a whole, the loop's own cost included.
        warm_up: the calls before the first repeat.
    """

    repeats: tuple[NDArray[np.float64], ...]
    elapsed: tuple[float, ...]
    warm_up: WarmUp

    @property
    def latencies(self) -> NDArray[np.float64]:
        """Seconds of each call, over all repeats."""
        return np.concatenate(self.repeats)

    def rates(self, images: int) -> tuple[float, ...]:
        """Return images per second in each repeat, for `images` a call."""
        return tuple(images * len(calls) / seconds for calls, seconds in zip(self.repeats, self.elapsed, strict=True))

    def settings(self) -> dict[str, Any]:
        """Return the number of calls and seconds, for `Measurement.settings`."""
        return {
            "repeats": len(self.repeats),
            "iterations": [len(calls) for calls in self.repeats],
            "measured_seconds": round(sum(self.elapsed), 3),
            "warm_up_iterations": self.warm_up.calls,
            "warm_up_seconds": round(self.warm_up.seconds, 3),
            "warm_up_stable": self.warm_up.stable,
        }


def time_repeats(call: Call, options: TimingOptions, *, clock: Clock = time.perf_counter_ns) -> Timing:
    """Time a call that returns when its work is done.

    Args:
        call: gets the iteration's number, so that it can rotate its inputs.
        options: length and number of repeats.
        clock: in nanoseconds.
    """
    warmed = warm_up(call, options.warm_up_seconds, clock=clock)
    repeats, elapsed = [], []
    for _ in range(options.repeats):
        calls, total = _time_repeat(call, options.seconds, options.iterations, clock)
        repeats.append(calls)
        elapsed.append(total)
        options.report()
    return Timing(tuple(repeats), tuple(elapsed), warmed)


def warm_up(call: Call, seconds: float, *, clock: Clock = time.perf_counter_ns) -> WarmUp:
    """Call three times, then for at least `seconds` and until five calls in a row took equally long (within 10 %).

    It ends five times `seconds` after the third call even if the calls never become stable.
    """
    latencies: list[float] = []
    start = counted_from = clock()
    with gc_disabled():
        while True:
            before = clock()
            call(len(latencies))
            now = clock()
            latencies.append((now - before) / 1e9)
            if len(latencies) <= _FIRST_CALLS:
                counted_from = now
                continue
            counted = (now - counted_from) / 1e9
            stable = len(latencies) >= _STABLE_CALLS and spread(latencies[-_STABLE_CALLS:]) <= _STABLE_SPREAD
            if counted >= seconds and (stable or counted >= _MAX_WARM_UP_FACTOR * seconds):
                return WarmUp(len(latencies), (now - start) / 1e9, stable)


def time_calls(call: Call, count: int, *, clock: Clock = time.perf_counter_ns) -> float:
    """Return the seconds that `count` calls take together."""
    with gc_disabled():
        start = clock()
        for number in range(count):
            call(number)
        return (clock() - start) / 1e9


def _time_repeat(call: Call, seconds: float, iterations: int, clock: Clock) -> tuple[NDArray[np.float64], float]:
    latencies: list[int] = []
    limit = int(seconds * 1e9)
    with gc_disabled():
        start = previous = clock()
        while previous - start < limit or len(latencies) < iterations:
            call(len(latencies))
            now = clock()
            latencies.append(now - previous)
            previous = now
    return np.asarray(latencies, np.float64) / 1e9, (previous - start) / 1e9


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect garbage before the block, and keep Python's collector off inside."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def random_batches(count: int, batch: int, size: tuple[int, int], *, seed: int = 0) -> list[ImageBatch]:
    """Return `count` different arrays of noise, uint8 [batch, H0, W0, 3]; the same seed gives the same arrays."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (batch, *size, 3), dtype=np.uint8) for _ in range(count)]
