"""The timer: a discarded warm-up, then repeats of many batches each.

As in `infer`, a session on a GPU gets `PipelinedSession.depth` batches at a time, so that copies overlap the
computation; to measure latency it gets one. Every repeat starts and ends with an idle device, so each counted batch
starts and finishes within its repeat.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.bench.measurement import Figure
from opal_deploy.bench.options import TimingOptions
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.runtime.session import ImageBatch, PaddingSession, PipelinedSession, Session, StagedSession, pinned
from opal_deploy.statistics import spread

Clock = Callable[[], int]

# the first batches compile, choose kernels and record CUDA graphs, once for each of up to three sets of buffers: their
# time does not count as warm-up
_FIRST_CALLS = 3
# the warm-up ends when the last few batches differ by no more than this
_STABLE_CALLS, _STABLE_SPREAD = 5, 0.10
# a machine that never becomes stable gets this many times the minimum warm-up
_MAX_WARM_UP_FACTOR = 5
# calls after the timed ones that measure the stages
_STAGED_CALLS = 20


@dataclass(frozen=True)
class Batches:
    """The work that is timed, in batches that are begun and finished in order.

    Attributes:
        begin: begins the batch of this number; does all of it where `depth` is 1.
        finish: waits for the oldest batch that was begun.
        depth: number of batches in flight before the oldest is waited for.
    """

    begin: Callable[[int], object]
    finish: Callable[[], object] = lambda: None
    depth: int = 1

    def run(self, number: int) -> None:
        """Begin one batch and wait for it; none may be in flight."""
        self.begin(number)
        self.finish()


@dataclass(frozen=True)
class WarmUp:
    """The discarded batches: their number, their seconds, and whether the last few took equally long."""

    calls: int
    seconds: float
    stable: bool


@dataclass(frozen=True)
class Timing:
    """The time of every batch.

    Attributes:
        repeats: seconds of each batch from its begin to its end, one float64 array [iterations] per repeat.
        elapsed: seconds of each repeat, including the loop itself.
        depth: batches in flight.
    """

    repeats: tuple[NDArray[np.float64], ...]
    elapsed: tuple[float, ...]
    warm_up: WarmUp
    depth: int = 1

    def throughput(self, images: int) -> Figure:
        """Return images per second, one value per repeat, for `images` per batch."""
        rates = (images * len(calls) / seconds for calls, seconds in zip(self.repeats, self.elapsed, strict=True))
        return Figure.of_repeats(rates, "images/s", "higher")

    def latency(self, percent: float | None = None) -> Figure:
        """Return the batches' mean milliseconds, or a percentile of them, over all repeats and in each."""
        all_calls, *repeats = (
            1e3 * float(np.mean(calls) if percent is None else np.percentile(calls, percent))
            for calls in (np.concatenate(self.repeats), *self.repeats)
        )
        return Figure(all_calls, "ms", "lower", tuple(repeats))

    def settings(self) -> dict[str, Any]:
        """Return the number of batches, those in flight, and seconds, for `Measurement.settings`."""
        return {
            "in_flight": self.depth,
            "repeats": len(self.repeats),
            "iterations": [len(calls) for calls in self.repeats],
            "measured_seconds": round(sum(self.elapsed), 3),
            "warm_up_iterations": self.warm_up.calls,
            "warm_up_seconds": round(self.warm_up.seconds, 3),
            "warm_up_stable": self.warm_up.stable,
        }


def time_stages(session: Session, batches: Sequence[ImageBatch]) -> dict[str, Figure]:
    """Return median milliseconds per batch of a GPU's copies and computation; empty for a session without stages.

    The stages are waited for one by one in separate calls. The session must be warm at this batch size, and the batches
    in page-locked memory.
    """
    if not isinstance(session, StagedSession):
        return {}
    stages = [session.run_staged(batches[number % len(batches)])[1] for number in range(_STAGED_CALLS)]
    figures = {}
    for name in ("host_to_device", "compute", "device_to_host"):
        values = [1e3 * seconds for call in stages if (seconds := getattr(call, name)) is not None]
        if values:
            figures[f"{name}_ms"] = Figure(float(np.median(values)), "ms", "lower")
    return figures


@contextmanager
def rotate_inputs(loaded: LoadedTarget, batch: int, buffers: int, *, one_by_one: bool = False) -> Iterator[Batches]:
    """Yield the runs of a session, without padding, on `buffers` batches of noise in turn."""
    session = loaded.session
    if isinstance(session, PaddingSession):
        session.add_batch_size(batch)
    with pinned_noise(loaded, buffers, batch) as batches:
        yield in_turn(session, batches, one_by_one=one_by_one)


def in_turn(session: Session, batches: Sequence[ImageBatch], *, one_by_one: bool = False) -> Batches:
    """Return the runs of a session on batches in turn, as many in flight as it takes, or one by one."""
    if one_by_one or not isinstance(session, PipelinedSession):
        return Batches(lambda number: session.run(batches[number % len(batches)]))
    pipelined, handles = session, deque[object]()
    return Batches(
        lambda number: handles.append(pipelined.submit(batches[number % len(batches)])),
        lambda: pipelined.collect(handles.popleft()),
        pipelined.depth,
    )


@contextmanager
def pinned_noise(loaded: LoadedTarget, count: int, batch: int) -> Iterator[list[ImageBatch]]:
    """Yield batches of noise, page-locked for a GPU, as in `infer`.

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


def time_repeats(batches: Batches, options: TimingOptions, *, clock: Clock = time.perf_counter_ns) -> Timing:
    """Time batches in repeats; the clock counts nanoseconds."""
    warmed = warm_up(batches, options.warmup, clock=clock)
    timed = []
    for _ in range(options.repeats):
        timed.append(time_repeat(batches, options.seconds, options.iterations, clock))
        options.on_repeat()
    return Timing(tuple(each for each, _ in timed), tuple(seconds for _, seconds in timed), warmed, batches.depth)


def warm_up(batches: Batches, seconds: float, *, clock: Clock = time.perf_counter_ns) -> WarmUp:
    """Run three batches, then for at least `seconds` and until five in a row differ by at most 10 %.

    Stops five times `seconds` after the third batch even if they never become stable.
    """
    finished: list[tuple[int, int]] = []
    stable = False

    def is_warm(*_: int) -> bool:
        nonlocal stable
        if len(finished) <= _FIRST_CALLS:
            return False
        counted = (finished[-1][1] - finished[_FIRST_CALLS - 1][1]) / 1e9
        last = [end - begin for begin, end in finished[-_STABLE_CALLS:]]
        stable = len(last) == _STABLE_CALLS and spread(last) <= _STABLE_SPREAD
        return counted >= seconds and (stable or counted >= _MAX_WARM_UP_FACTOR * seconds)

    with gc_disabled():
        finished.extend(run_batches(batches, is_warm, clock))
    return WarmUp(len(finished), (finished[-1][1] - finished[0][0]) / 1e9, stable)


def time_calls(batches: Batches, count: int, *, clock: Clock = time.perf_counter_ns) -> float:
    """Return the total seconds of `count` batches."""
    return time_repeat(batches, 0, count, clock)[1]


def time_repeat(batches: Batches, seconds: float, iterations: int, clock: Clock) -> tuple[NDArray[np.float64], float]:
    """Return the seconds of each of at least `iterations` batches in at least `seconds`, and of all."""
    latencies: list[int] = []
    limit = int(seconds * 1e9)
    with gc_disabled():
        start = end = clock()
        for begin, end in run_batches(batches, lambda begun, passed: begun >= iterations and passed >= limit, clock):
            latencies.append(end - begin)
    return np.asarray(latencies, np.float64) / 1e9, (end - start) / 1e9


def run_batches(batches: Batches, is_enough: Callable[[int, int], bool], clock: Clock) -> Iterator[tuple[int, int]]:
    """Run batches, and yield the times at which each was begun and finished.

    Args:
        is_enough: whether no more are begun, from the number that were and the nanoseconds until the last one was
            finished; those in flight are finished.
    """
    begun: deque[int] = deque()
    number = 0
    start = end = clock()
    while not is_enough(number, end - start):
        begun.append(clock())
        batches.begin(number)
        number += 1
        if len(begun) == batches.depth:
            batches.finish()
            end = clock()
            yield begun.popleft(), end
    while begun:
        batches.finish()
        yield begun.popleft(), clock()


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
