"""MLPerf's server scenario: the largest rate of random arrivals whose 99th percentile latency stays within a limit.

Arrivals are a Poisson process, drawn beforehand. One loop serves them: it takes every image that has arrived, up to
`max_batch`, or sleeps until the next arrival. An image's latency is the time from its arrival to its outputs, waiting
included. The largest rate is found by bisection, with the same draws stretched to each rate. It must stay within the
limit with other draws too; otherwise a rate lower by a tenth is tried.

No rate is tried where single images, one after another, miss the limit by themselves, nor rates at which the model
would be idle nearly always: there, its own latency has outliers, and waiting has nothing to do with it.

Queries of one call are late together, so a trial lasts for at least 100 calls, not only 100 queries. MLPerf asks for
270,336 queries and a minute or more at one rate, and for a load generator outside the process; here the measurement
records how many queries and calls each percentile is of, and a bound of the share that is late.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.bench.batch_timing import pinned_noise
from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement
from opal_deploy.bench.memory import peak_memory_mb, reset_peak_memory
from opal_deploy.bench.monitor import monitor_devices
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.bench.timing import TimingOptions, gc_disabled, time_repeats
from opal_deploy.statistics import clopper_pearson_bound, percentile

RunBatch = Callable[[int], object]
Clock = Callable[[], float]
Sleep = Callable[[float], None]

SERVER = "server"
UNATTAINABLE = "unattainable"
PERCENT = 99
# of a trial, so that a 99th percentile is of as many
MIN_QUERIES = MIN_CALLS = 100
# the search ends at rates that keep the model busy for a smaller share of the time
_MIN_USE = 0.05
# a trial of more is announced
_LONG_SECONDS = 30
# the bisection ends when the rate is known to this share
_PRECISION = 0.05
_MAX_STEPS = 10
# a rate that does not hold with other arrivals is multiplied by this, at most so often
_MAX_REDUCTIONS, _REDUCTION = 10, 0.9


@dataclass(frozen=True)
class ServerOptions:
    """The options of the server scenario.

    Attributes:
        limit_ms: limit of the 99th percentile.
        max_batch: most images a call.
        timing: `seconds` is the least length of a trial (of at least 100 queries and calls); `repeats` is how often the
            rate must stay within the limit again, each time with other arrivals; `seed` is of noise and arrivals.
            `iterations` is not used.
    """

    limit_ms: float
    max_batch: int = 32
    timing: TimingOptions = field(default_factory=TimingOptions)


@dataclass(frozen=True)
class Trial:
    """One run at one rate of arrivals.

    Attributes:
        rate: arrivals per second.
        latencies: float64 [queries]: seconds from arrival to outputs of the queries that were served.
        batches: number of calls.
        complete: whether it had its length; a trial ends early once too many exceeded the limit.
        limit: in seconds.
    """

    rate: float
    latencies: NDArray[np.float64]
    batches: int
    complete: bool
    limit: float

    @property
    def late(self) -> int:
        """Number of queries that exceeded the limit."""
        return int((self.latencies > self.limit).sum())

    @property
    def within_limit(self) -> bool:
        """Whether it had its length and the 99th percentile is at most the limit."""
        return self.complete and percentile(self.latencies, PERCENT) <= self.limit

    def describe(self) -> str:
        """Return a line for a person: what was late of how many queries, and whether the limit was kept."""
        name = f"{self.rate:.3g} queries/s" if self.rate else "single images, no waiting"
        calls = f" in {self.batches} calls" if self.batches != len(self.latencies) else ""
        text = f"{name}: {self.late} of {len(self.latencies)} queries{calls} over {1e3 * self.limit:g} ms"
        if not self.complete:
            return f"{text}, ended early: not kept"
        kept = "kept" if self.within_limit else "not kept"
        return f"{text}, p{PERCENT} {1e3 * percentile(self.latencies, PERCENT):.2f} ms: {kept}"

    def to_dict(self) -> dict[str, Any]:
        """Return a summary for JSON."""
        return {
            "queries_per_second": round(self.rate, 4),
            "queries": len(self.latencies),
            "calls": self.batches,
            "late": self.late,
            "p50_ms": round(1e3 * percentile(self.latencies, 50), 4),
            "p99_ms": round(1e3 * percentile(self.latencies, PERCENT), 4),
            "mean_batch": round(len(self.latencies) / self.batches, 3),
            "complete": self.complete,
            "held": self.within_limit,
        }


def measure_server(
    loaded: LoadedTarget, options: ServerOptions, report: Callable[[str], None] = lambda _: None
) -> Measurement:
    """Measure the largest rate of arrivals whose 99th percentile latency stays within the limit.

    Args:
        loaded: the model.
        options: the limit, and how long a rate is tried.
        report: gets a line about each trial when it has ended, and before one that takes long.

    Raises:
        StoppedEarly: memory is full, or the device was lost.
    """
    timing, limit = options.timing, options.limit_ms / 1e3
    reset_peak_memory()
    with (
        _rotate_partial_batches(loaded, options) as run_batch,
        monitor_devices(loaded.target.device) as monitor,
    ):
        capacity, settings = _measure_capacity(run_batch, options)
        alone = run_alone(run_batch, limit)
        report(alone.describe())

        def try_rate(rate: float, seed: int = timing.seed) -> Trial:
            due = draw_arrivals(rate, timing.seconds, seed=seed, max_batch=options.max_batch)
            if MIN_QUERIES / rate > _LONG_SECONDS:
                report(f"trying {rate:.3g} queries/s, which takes up to {MIN_QUERIES / rate:.0f} s")
            trial = serve(run_batch, rate, due, max_batch=options.max_batch, limit=limit, min_seconds=timing.seconds)
            report(trial.describe())
            return trial

        single = percentile(alone.latencies, 50)
        floor = _MIN_USE / single
        rate, tried = find_largest_rate(try_rate, capacity, floor) if alone.within_limit else (0.0, [])
        confirmed: list[Trial] = []
        if rate:
            rate, confirmed, failed = confirm_rate(
                lambda lower, repeat: try_rate(lower, timing.seed + 1 + repeat), rate, timing.repeats
            )
            tried += failed
    marks = list(monitor.marks)
    figures = {
        f"lone_p{percent}_ms": Figure(1e3 * percentile(alone.latencies, percent), "ms", "lower")
        for percent in ((50, PERCENT) if alone.complete else (50,))
    }
    if rate:
        figures = {"queries_per_second": Figure(rate, "queries/s", "higher"), **_trial_figures(confirmed), **figures}
    else:
        marks.append(f"{UNATTAINABLE}: {_explain_unattainable(alone, tried, options, floor)}")
    figures["peak_memory"] = Figure(peak_memory_mb(), "MB", "lower")
    return Measurement(
        kind="server",
        target=loaded.target,
        case={
            "scenario": SERVER,
            "limit_ms": options.limit_ms,
            "max_batch": options.max_batch,
            "threads": loaded.threads,
        },
        figures=figures,
        settings={
            **settings,
            "seconds_per_rate": timing.seconds,
            "arrivals": "Poisson, drawn beforehand; one loop takes all that have arrived, up to max_batch",
            "search": "bisection to 5 %, then down by tenths until it holds in every repeat; MLPerf tries for longer",
            "least_queries": MIN_QUERIES,
            "least_calls": MIN_CALLS,
            "repeats": timing.repeats,
            "buffers": timing.buffers,
            "seed": timing.seed,
        },
        timed=f"from an image's arrival to its outputs, waiting included; in between {loaded.timed}",
        marks=tuple(marks),
        conditions=monitor.conditions,
        details={
            "alone": alone.to_dict(),
            "tried": [trial.to_dict() for trial in tried],
            "held": [trial.to_dict() for trial in confirmed],
        },
        **provenance(),
    )


def draw_arrivals(rate: float, seconds: float, *, seed: int, max_batch: int = 1) -> NDArray[np.float64]:
    """Return arrival times in seconds, ascending: a Poisson process for at least `seconds`, 100 queries and calls."""
    count = max(MIN_QUERIES, MIN_CALLS * max_batch, int(np.ceil(rate * seconds)))
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    times: NDArray[np.float64] = np.cumsum(gaps) / rate
    return times


def serve(
    run_batch: RunBatch,
    rate: float,
    due: NDArray[np.float64],
    *,
    max_batch: int,
    limit: float,
    min_seconds: float = 0.0,
    clock: Clock = time.perf_counter,
    sleep: Sleep = time.sleep,
) -> Trial:
    """Serve queries as they arrive, until there were 100 queries, 100 calls and `min_seconds`, or no more arrive.

    Args:
        run_batch: runs so many images and returns when that is done.
        rate: arrivals per second that `due` was drawn for.
        due: arrival times in seconds, ascending.
        max_batch: most images a call.
        limit: of the 99th percentile, in seconds.
        min_seconds: least length.
        clock, sleep: in seconds.
    """
    latencies = np.zeros(len(due))
    done = late = batches = 0
    # with more late queries than this, the percentile exceeds the limit whatever follows
    max_late = _max_late(len(due))
    complete = False
    with gc_disabled():
        start = clock()
        while not complete and late <= max_late:
            now = clock() - start
            waiting = int(np.searchsorted(due, now, side="right")) - done
            if waiting < 1:
                sleep(due[done] - now)
                continue
            count = min(waiting, max_batch)
            run_batch(count)
            finished = clock() - start
            latencies[done : done + count] = finished - due[done : done + count]
            late += int((latencies[done : done + count] > limit).sum())
            done, batches = done + count, batches + 1
            lasted = done >= MIN_QUERIES and batches >= MIN_CALLS and finished >= min_seconds
            complete = done == len(due) or lasted
    return Trial(rate, latencies[:done], batches, complete, limit)


def run_alone(run_batch: RunBatch, limit: float, *, clock: Clock = time.perf_counter) -> Trial:
    """Run single images one after another, 100 or until too many exceed the limit: no arrivals are served faster.

    Args:
        run_batch: runs so many images and returns when that is done.
        limit: of the 99th percentile, in seconds.
        clock: in seconds.
    """
    latencies: list[float] = []
    late = 0
    with gc_disabled():
        while len(latencies) < MIN_CALLS and late <= _max_late(MIN_CALLS):
            start = clock()
            run_batch(1)
            latencies.append(clock() - start)
            late += latencies[-1] > limit
    return Trial(0.0, np.asarray(latencies), len(latencies), len(latencies) == MIN_CALLS, limit)


def _max_late(queries: int) -> float:
    """Return the number of late queries beyond which the 99th percentile of so many exceeds the limit."""
    return queries * (1 - PERCENT / 100) + 1


def find_largest_rate(
    try_rate: Callable[[float], Trial], capacity: float, floor: float = 0.0
) -> tuple[float, list[Trial]]:
    """Find the largest rate within the limit to 5 %, by bisection between `floor` and `capacity`.

    Args:
        try_rate: runs one trial.
        capacity: queries per second that nothing can exceed for long.
        floor: queries per second that no smaller rate is tried than.

    Returns:
        The rate, 0 if none stayed within the limit, and every trial.
    """
    tried: list[Trial] = []
    low, high = 0.0, capacity
    while len(tried) < _MAX_STEPS and high - low > _PRECISION * high and (low + high) / 2 >= floor:
        tried.append(try_rate((low + high) / 2))
        if tried[-1].within_limit:
            low = tried[-1].rate
        else:
            high = tried[-1].rate
    return low, tried


def confirm_rate(
    try_rate: Callable[[float, int], Trial], rate: float, repeats: int
) -> tuple[float, list[Trial], list[Trial]]:
    """Find the largest of `rate`, nine tenths of it, and so on, that stays within the limit in every repeat.

    Args:
        try_rate: runs one trial at a rate with the arrivals of a repeat.
        rate: the first rate.
        repeats: trials that a rate must pass.

    Returns:
        The rate, 0 if none passed, its trials, and the trials that failed.
    """
    failed: list[Trial] = []
    for _ in range(_MAX_REDUCTIONS):
        passed: list[Trial] = []
        for number in range(repeats):
            trial = try_rate(rate, number)
            if not trial.within_limit:
                failed.append(trial)
                break
            passed.append(trial)
        else:
            return rate, passed, failed
        rate *= _REDUCTION
    return 0.0, [], failed


@contextmanager
def _rotate_partial_batches(loaded: LoadedTarget, options: ServerOptions) -> Iterator[RunBatch]:
    """Make a call that runs the session on the first so many images of the next batch of noise."""
    timing = options.timing
    with pinned_noise(loaded, timing.buffers, options.max_batch, timing.seed) as buffers:
        numbers = itertools.cycle(range(len(buffers)))
        yield lambda count: loaded.session.run(buffers[next(numbers)][:count])


def _measure_capacity(run_batch: RunBatch, options: ServerOptions) -> tuple[float, dict[str, object]]:
    """Return the most images per second, and the warm-up for the settings.

    Every batch size runs once before, since any may occur.
    """
    for count in range(1, options.max_batch + 1):
        run_batch(count)
    brief = replace(options.timing, seconds=min(1.0, options.timing.seconds), iterations=5, repeats=1)
    single = time_repeats(lambda _: run_batch(1), brief)
    full = time_repeats(lambda _: run_batch(options.max_batch), brief)
    warm_up = {"warm_up_iterations": options.max_batch + single.warm_up.calls + full.warm_up.calls}
    # a single image can be the fastest, mostly on CPUs
    capacity = max(single.rates(1)[0], full.rates(options.max_batch)[0])
    return capacity, {**warm_up, "capacity": capacity}


def _explain_unattainable(alone: Trial, tried: list[Trial], options: ServerOptions, floor: float) -> str:
    """Return why no rate kept the limit."""
    calls = f"{alone.late} of {len(alone.latencies)} single images"
    median = f"median {1e3 * percentile(alone.latencies, 50):.2f} ms"
    if not alone.within_limit:
        return f"{calls} alone already took longer than {options.limit_ms:g} ms ({median}), so no rate was tried"
    lowest = min((trial.rate for trial in tried), default=floor)
    return (
        f"no rate down to {lowest:.3g} queries/s kept {options.limit_ms:g} ms, and lower ones would hardly keep the "
        f"model busy; {calls} alone took longer ({median})"
    )


def _trial_figures(trials: list[Trial]) -> dict[str, Figure]:
    """Return each percentile and the mean batch over the trials of one rate."""
    percentiles = {
        f"p{percent}_ms": Figure.of_repeats(
            (1e3 * percentile(trial.latencies, percent) for trial in trials), "ms", "lower"
        )
        for percent in (50, 90, PERCENT)
    }
    batches = [len(trial.latencies) / trial.batches for trial in trials]
    queries, late = sum(len(trial.latencies) for trial in trials), sum(trial.late for trial in trials)
    percentiles["queries"] = Figure(queries, "queries")
    percentiles["late"] = Figure(100 * late / queries, "%")
    # as if queries were late independently of each other, which those of one call are not
    percentiles["late_bound"] = Figure(100 * clopper_pearson_bound(late, queries), "%")
    return {**percentiles, "mean_batch": Figure.of_repeats(batches, "images")}
