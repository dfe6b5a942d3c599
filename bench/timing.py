"""Timing one call again and again: warm-up thrown away and counted, then repeats of many iterations each.

Inputs to time with: several batches of noise, so that no call finds its input in the cache of the last."""

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
from opal_deploy.statistics.intervals import spread

Call = Callable[[int], object]
Clock = Callable[[], int]

# warm-up ends when the last few calls differ by no more than this
_STABLE_CALLS, _STABLE_SPREAD = 5, 0.10
_MIN_CALLS = 3
# machines that never become stable: so many times the least warm-up
_MAX_WARM_UP_FACTOR = 5


@dataclass(frozen=True)
class WarmUp:
    """What ran before anything counted: calls, seconds, and whether the last few calls took equally long."""

    calls: int
    seconds: float
    stable: bool


@dataclass(frozen=True)
class Timing:
    """What was measured.

    Attributes:
        repeats: one array a repeat, float64 [iterations]: seconds of each call.
        elapsed: seconds of each repeat as a whole, the loop's own cost included.
        warm_up: what ran before.
    """

    repeats: tuple[NDArray[np.float64], ...]
    elapsed: tuple[float, ...]
    warm_up: WarmUp

    @property
    def latencies(self) -> NDArray[np.float64]:
        """Seconds of each call, of all repeats."""
        return np.concatenate(self.repeats)

    def rates(self, images: int) -> tuple[float, ...]:
        """Images a second in each repeat, for so many images a call."""
        return tuple(images * len(calls) / seconds for calls, seconds in zip(self.repeats, self.elapsed, strict=True))

    def settings(self) -> dict[str, Any]:
        """How it was measured, for the record."""
        return {
            "repeats": len(self.repeats),
            "iterations": [len(calls) for calls in self.repeats],
            "measured_seconds": round(sum(self.elapsed), 3),
            "warm_up_iterations": self.warm_up.calls,
            "warm_up_seconds": round(self.warm_up.seconds, 3),
            "warm_up_stable": self.warm_up.stable,
        }


def time_repeats(
    call: Call,
    *,
    seconds: float = 3.0,
    iterations: int = 10,
    repeats: int = 3,
    warm_up_seconds: float = 1.0,
    clock: Clock = time.perf_counter_ns,
) -> Timing:
    """Time a call that returns when its work is done.

    Args:
        call: given the iteration's number, so that it can rotate its inputs.
        seconds, iterations: each repeat lasts at least so long and has at least so many.
        repeats: how often; the spread is between them.
        warm_up_seconds: see `warm_up`.
        clock: nanoseconds.
    """
    warmed = warm_up(call, warm_up_seconds, clock=clock)
    found, elapsed = [], []
    for _ in range(repeats):
        calls, total = _repeat(call, seconds, iterations, clock)
        found.append(calls)
        elapsed.append(total)
    return Timing(tuple(found), tuple(elapsed), warmed)


def warm_up(call: Call, seconds: float, *, clock: Clock = time.perf_counter_ns) -> WarmUp:
    """Call for at least `seconds` and three times, then on until five in a row took equally long (within 10 %).

    A machine that never becomes stable gets five times `seconds`.
    """
    taken: list[float] = []
    start = clock()
    with gc_disabled():
        while True:
            before = clock()
            call(len(taken))
            now = clock()
            taken.append((now - before) / 1e9)
            total = (now - start) / 1e9
            stable = len(taken) >= _STABLE_CALLS and spread(taken[-_STABLE_CALLS:]) <= _STABLE_SPREAD
            if total >= seconds and len(taken) >= _MIN_CALLS and (stable or total >= _MAX_WARM_UP_FACTOR * seconds):
                return WarmUp(len(taken), total, stable)


def time_calls(call: Call, count: int, *, clock: Clock = time.perf_counter_ns) -> float:
    """Seconds that `count` calls take together."""
    with gc_disabled():
        start = clock()
        for number in range(count):
            call(number)
        return (clock() - start) / 1e9


def _repeat(call: Call, seconds: float, iterations: int, clock: Clock) -> tuple[NDArray[np.float64], float]:
    taken: list[int] = []
    limit = int(seconds * 1e9)
    with gc_disabled():
        start = previous = clock()
        while previous - start < limit or len(taken) < iterations:
            call(len(taken))
            now = clock()
            taken.append(now - previous)
            previous = now
    return np.asarray(taken, np.float64) / 1e9, (previous - start) / 1e9


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Python's garbage collector collects before the block, not in it."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def random_batches(count: int, batch: int, size: tuple[int, int], *, seed: int = 0) -> list[ImageBatch]:
    """`count` arrays, uint8 [batch, H0, W0, 3], all different; the same for the same seed and numpy."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (batch, *size, 3), dtype=np.uint8) for _ in range(count)]
