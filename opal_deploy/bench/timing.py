"""The timer: a discarded warm-up, then repeats of many batches each.

As in `infer`, a session on a GPU gets `PipelinedSession.depth` batches at a time, so that copies overlap the
computation; to measure latency it gets one. Every repeat starts and ends with an idle device. The repeats of several
models are interleaved: A B C, then C B A, and so on, so that a machine whose speed drifts favours none.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.bench.measurement import Figure
from opal_deploy.bench.options import SweepOptions
from opal_deploy.runtime.devices import GpuSensors, NvmlError, parse_device
from opal_deploy.runtime.session import ImageBatch, PaddingSession, PipelinedSession, Session, pinned

Progress = Callable[[int, int], None]
Conditions = dict[str, dict[str, Any]]
# the seconds of each batch from its begin to its end, float64 [iterations], and those of all
Repeat = tuple[NDArray[np.float64], float]

# the first batches compile, choose kernels and record CUDA graphs, once for each of up to three sets of buffers: their
# time does not count as warm-up
_FIRST_CALLS = 3
# reasons for lower clocks that were chosen; all others are throttling
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "display_clock_setting")


@dataclass(frozen=True)
class Run:
    """A session on batches in turn, as many in flight as it takes, or one at a time."""

    session: Session
    batches: Sequence[ImageBatch]
    one_by_one: bool = False

    @property
    def depth(self) -> int:
        """The number of batches in flight."""
        return self.session.depth if isinstance(self.session, PipelinedSession) and not self.one_by_one else 1

    def time_repeat(self, seconds: float, iterations: int) -> Repeat:
        """Time at least `iterations` batches in at least `seconds`, with Python's garbage collector off."""
        # a session with a depth of more than 1 is pipelined
        session: Any = self.session
        depth, clock = self.depth, time.perf_counter_ns
        latencies: list[int] = []
        in_flight: deque[tuple[int, object]] = deque()
        collects_garbage = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            number, start = 0, clock()
            end = start
            while (is_due := number < iterations or end - start < seconds * 1e9) or in_flight:
                if is_due:
                    begin, images = clock(), self.batches[number % len(self.batches)]
                    number += 1
                    in_flight.append((begin, session.submit(images) if depth > 1 else session.run(images)))
                    if len(in_flight) < depth:
                        continue
                begin, handle = in_flight.popleft()
                if depth > 1:
                    session.collect(handle)
                end = clock()
                latencies.append(end - begin)
        finally:
            if collects_garbage:
                gc.enable()
        return np.asarray(latencies, np.float64) / 1e9, (end - start) / 1e9


@dataclass(frozen=True)
class Timing:
    """The repeats of a model, the number of batches discarded before them, and the number of batches in flight."""

    repeats: tuple[Repeat, ...]
    warm_up: int
    depth: int

    def throughput(self, images: int) -> Figure:
        """Return images per second, one value per repeat, for `images` per batch."""
        rates = (images * len(calls) / seconds for calls, seconds in self.repeats)
        return Figure.of_repeats(rates, "images/s", "higher")

    def latency(self, percent: float | None = None) -> Figure:
        """Return the batches' mean milliseconds, or a percentile of them, over all repeats and in each."""
        repeats = [calls for calls, _ in self.repeats]
        value, *values = (
            1e3 * float(np.mean(calls) if percent is None else np.percentile(calls, percent))
            for calls in (np.concatenate(repeats), *repeats)
        )
        return Figure(value, "ms", "lower", tuple(values))

    def settings(self) -> dict[str, Any]:
        """Return the number of batches, those in flight, and seconds, for `Measurement.settings`."""
        return {
            "in_flight": self.depth, "repeats": len(self.repeats),
            "iterations": [len(calls) for calls, _ in self.repeats],
            "measured_seconds": round(sum(seconds for _, seconds in self.repeats), 3),
            "warm_up_iterations": self.warm_up,
        }  # fmt: skip


def time_runs(
    runs: Sequence[Run], options: SweepOptions, progress: Progress = lambda done, total: None
) -> list[Timing]:
    """Time one or more models; each repeat of a model has at least `iterations` batches in about `seconds`.

    The warm-up is three batches and then `warmup` seconds. Of several models each repeat has a number of batches that
    is fixed before, and starts with one uncounted batch, which refills the caches.
    """
    warm, counts = [], []
    for run in runs:
        first, (last, elapsed) = run.time_repeat(0, _FIRST_CALLS)[0], run.time_repeat(options.warmup, 1)
        warm.append(len(first) + len(last))
        counts.append(max(options.iterations, math.ceil(options.seconds * len(last) / max(elapsed, 1e-9))))
    # stopping several models by the clock would favour those whose batches fill it exactly
    lengths = [(0.0, count) for count in counts] if len(runs) > 1 else [(options.seconds, options.iterations)]
    timed: list[list[Repeat]] = [[] for _ in runs]
    for number in range(options.repeats):
        order = range(len(runs))
        for index in order if number % 2 == 0 else reversed(order):
            if len(runs) > 1:
                # another input than the one that the repeat starts with
                runs[index].session.run(runs[index].batches[-1])
            timed[index].append(runs[index].time_repeat(*lengths[index]))
        progress(number + 1, options.repeats)
    return [Timing(tuple(made), discarded, run.depth) for made, discarded, run in zip(timed, warm, runs, strict=True)]


@contextmanager
def pinned_noise(session: Session, count: int, batch: int) -> Iterator[list[ImageBatch]]:
    """Yield `count` different arrays of noise, uint8 [batch, H0, W0, 3], the same in every call.

    They are executed without padding, and page-locked for a GPU as in `infer`. Otherwise the host copies every batch
    once more, which hides differences on the device.
    """
    if isinstance(session, PaddingSession):
        session.add_batch_size(batch)
    generator, shape = np.random.default_rng(0), (batch, *session.metadata.input_size, 3)
    batches = [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]
    with ExitStack() as stack:
        for images in batches:
            stack.enter_context(pinned(session, images))
        yield batches


def read_gpus(devices: Iterable[str]) -> Conditions:
    """Return the clocks, power and temperature of the GPUs among devices such as `cpu` and `cuda:0`, from NVML."""
    readings: Conditions = {}
    for device in sorted(set(devices) - {"cpu"}):
        try:
            gpu = GpuSensors(parse_device(device)[1])
            readings[device] = {"name": gpu.name, **gpu.read(), "clock_reasons": gpu.read_clock_reasons() or []}
        except NvmlError as error:
            readings[device] = {"not_read": f"NVML: {error}"}
    return readings


def find_throttling(after: Conditions) -> tuple[str, ...]:
    """Return a mark for each reason other than a setting for which a GPU's clocks were lower after a run."""
    reasons = dict.fromkeys(reason for readings in after.values() for reason in readings.get("clock_reasons", ()))
    return tuple(f"throttled: {reason}" for reason in reasons if reason not in _HARMLESS)
