"""Time one call, or one model at one batch size: a discarded warm-up, then repeats of many calls each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.bench.measurement import NOISY, Figure
from opal_deploy.bench.monitor import monitor_devices, peak_memory_mb, reset_peak_memory
from opal_deploy.bench.options import TimingOptions
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.runtime.session import ImageBatch, PaddingSession, Session, StagedSession, pinned
from opal_deploy.statistics import mean, percentile, spread

Call = Callable[[int], object]
Clock = Callable[[], int]

# the first calls compile, choose kernels and record CUDA graphs, once for each of up to three sets of buffers: their
# time does not count as warm-up
_FIRST_CALLS = 3
# the warm-up ends when the last few calls differ by no more than this
_STABLE_CALLS, _STABLE_SPREAD = 5, 0.10
# a machine that never becomes stable gets this many times the minimum warm-up
_MAX_WARM_UP_FACTOR = 5
# calls after the timed ones that measure the stages
_STAGED_CALLS = 20


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
        repeats: seconds of each call, one float64 array [iterations] per repeat.
        elapsed: seconds of each repeat, including the loop itself.
    """

    repeats: tuple[NDArray[np.float64], ...]
    elapsed: tuple[float, ...]
    warm_up: WarmUp

    @property
    def latencies(self) -> NDArray[np.float64]:
        """Seconds of each call, over all repeats."""
        return np.concatenate(self.repeats)

    def rates(self, images: int) -> tuple[float, ...]:
        """Return images per second in each repeat, for `images` per call."""
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


@dataclass(frozen=True)
class BatchTiming:
    """The timing of one model at one batch size; settings, conditions and marks as in `Measurement`."""

    batch: int
    timing: Timing
    peak_megabytes: float
    settings: dict[str, Any]
    conditions: dict[str, Any]
    marks: tuple[str, ...]

    @property
    def throughput(self) -> Figure:
        """Images per second, one value per repeat."""
        return Figure.of_repeats(self.timing.rates(self.batch), "images/s", "higher")

    def latency(self, percent: float) -> Figure:
        """Return a percentile of the calls' milliseconds, over all repeats and in each."""
        return self._milliseconds(lambda calls: percentile(calls, percent))

    @property
    def mean_latency(self) -> Figure:
        """Mean milliseconds per call, over all repeats and in each."""
        return self._milliseconds(mean)

    def _milliseconds(self, statistic: Callable[[NDArray[np.float64]], float]) -> Figure:
        repeats = tuple(1e3 * statistic(calls) for calls in self.timing.repeats)
        return Figure(1e3 * statistic(self.timing.latencies), "ms", "lower", repeats)


def time_batch(loaded: LoadedTarget, batch: int, options: TimingOptions) -> BatchTiming:
    """Time one model at one batch size; raise StoppedEarly if memory is full, or the device was lost."""
    reset_peak_memory()
    with (
        rotate_inputs(loaded, batch, options.buffers) as call,
        monitor_devices(loaded.target.device) as monitor,
    ):
        timing = time_repeats(call, options)
    figure = Figure.of_repeats(timing.rates(batch), "images/s")
    noise = (f"{NOISY}: the repeats differ by {figure.spread:.0%}",) if figure.is_noisy else ()
    settings = {**timing.settings(), "buffers": options.buffers}
    return BatchTiming(batch, timing, peak_memory_mb(), settings, monitor.conditions, (*monitor.marks, *noise))


def time_stages(loaded: LoadedTarget, batch: int, buffers: int) -> dict[str, Figure]:
    """Return median milliseconds per batch of a GPU's copies and computation; empty on a CPU.

    The stages are waited for one by one in separate calls. The session must be warm at this batch size.
    """
    if loaded.target.device == "cpu":
        return {}
    with pinned_noise(loaded, buffers, batch) as batches:
        return time_stages_of(loaded.session, batches)


def time_stages_of(session: Session, batches: Sequence[ImageBatch]) -> dict[str, Figure]:
    """Return the figures of `time_stages` for a session on a GPU and its batches in page-locked memory."""
    if not isinstance(session, StagedSession):
        return {}
    stages = [session.run_staged(batches[number % len(batches)])[1] for number in range(_STAGED_CALLS)]
    figures = {}
    for name in ("host_to_device", "compute", "device_to_host"):
        values = [1e3 * seconds for call in stages if (seconds := getattr(call, name)) is not None]
        if values:
            figures[f"{name}_ms"] = Figure(percentile(values, 50), "ms", "lower")
    return figures


@contextmanager
def rotate_inputs(loaded: LoadedTarget, batch: int, buffers: int) -> Iterator[Call]:
    """Yield a call that runs the session, without padding, on the next of `buffers` batches of noise."""
    if isinstance(loaded.session, PaddingSession):
        loaded.session.add_batch_size(batch)
    with pinned_noise(loaded, buffers, batch) as batches:
        yield lambda number: loaded.session.run(batches[number % len(batches)])


@contextmanager
def pinned_noise(loaded: LoadedTarget, count: int, batch: int) -> Iterator[list[ImageBatch]]:
    """Yield batches of noise, page-locked for a GPU as those of `infer` are.

    Otherwise the host copies every batch once more, which hides differences on the device.
    """
    batches = random_batches(count, batch, loaded.metadata.input_size)
    with ExitStack() as stack:
        for images in batches:
            stack.enter_context(pinned(loaded.session, images))
        yield batches


def random_batches(count: int, batch: int, size: tuple[int, int], *, seed: int = 0) -> list[ImageBatch]:
    """Return `count` different arrays of noise, uint8 [batch, H0, W0, 3]; the same seed gives the same arrays."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (batch, *size, 3), dtype=np.uint8) for _ in range(count)]


def time_repeats(call: Call, options: TimingOptions, *, clock: Clock = time.perf_counter_ns) -> Timing:
    """Time a call that takes its number and returns when its work is done; the clock counts nanoseconds."""
    warmed = warm_up(call, options.warmup, clock=clock)
    timed = []
    for _ in range(options.repeats):
        timed.append(_time_repeat(call, options.seconds, options.iterations, clock))
        options.on_repeat()
    return Timing(tuple(calls for calls, _ in timed), tuple(seconds for _, seconds in timed), warmed)


def warm_up(call: Call, seconds: float, *, clock: Clock = time.perf_counter_ns) -> WarmUp:
    """Call three times, then for at least `seconds` and until five calls in a row differ by at most 10 %.

    Stops five times `seconds` after the third call even if the calls never become stable.
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
    """Return the total seconds of `count` calls."""
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
