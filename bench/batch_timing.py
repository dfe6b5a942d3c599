"""One model at one batch size, timed the way that `bench latency` and `bench throughput` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opal_deploy.bench.machine import peak_megabytes, provenance, reset_peak
from opal_deploy.bench.measurement import NOISY, NOISY_SPREAD, Figure, Kind, Measurement, Scalar
from opal_deploy.bench.monitor import monitor_devices
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.bench.timing import Timing, random_batches, time_repeats
from opal_deploy.runtime.session import StagedSession
from opal_deploy.statistics.intervals import mean, percentile

FAILED = "failed"
PERCENTILES = (50, 90, 95, 99)
# stages are told from so many calls after the timed ones
_STAGED_CALLS = 20


@dataclass(frozen=True)
class TimingOptions:
    """How a batch size is timed; see `timing.measure`.

    Attributes:
        seconds, iterations: each repeat lasts at least so long and has at least so many.
        repeats: the spread is between them.
        warm_up_seconds: least, thrown away.
        buffers: batches of noise that the calls rotate over.
        seed: of the noise.
    """

    seconds: float = 3.0
    iterations: int = 10
    repeats: int = 3
    warm_up_seconds: float = 1.0
    buffers: int = 4
    seed: int = 0


@dataclass(frozen=True)
class BatchTiming:
    """What came out for one batch size.

    Attributes:
        batch: images a call.
        timing: every call.
        peak_megabytes: of the process's resident memory, model included.
        settings, conditions, marks: for the record.
    """

    batch: int
    timing: Timing
    peak_megabytes: float
    settings: dict[str, Any]
    conditions: dict[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()

    @property
    def throughput(self) -> Figure:
        """Images per second, a figure a repeat."""
        return Figure.of_repeats(self.timing.rates(self.batch), "images/s", "higher")

    def latency(self, percent: float) -> Figure:
        """A percentile of the calls' milliseconds over all repeats, and what it was in each."""
        repeats = tuple(1e3 * percentile(calls, percent) for calls in self.timing.repeats)
        return Figure(1e3 * percentile(self.timing.latencies, percent), "ms", "lower", repeats)

    @property
    def mean_latency(self) -> Figure:
        """Milliseconds a call, likewise."""
        repeats = tuple(1e3 * mean(calls) for calls in self.timing.repeats)
        return Figure(1e3 * mean(self.timing.latencies), "ms", "lower", repeats)


def time_batch(opened: LoadedTarget, batch: int, options: TimingOptions) -> BatchTiming:
    """Time one model at one batch size.

    Raises:
        StoppedEarly: memory is full, or the device was lost.
    """
    call = rotate_inputs(opened, batch, options.buffers, options.seed)
    reset_peak()
    with monitor_devices(opened.target.device) as monitor:
        timing = time_repeats(
            call,
            seconds=options.seconds,
            iterations=options.iterations,
            repeats=options.repeats,
            warm_up_seconds=options.warm_up_seconds,
        )
    return BatchTiming(
        batch,
        timing,
        peak_megabytes(),
        {**timing.settings(), "buffers": options.buffers, "seed": options.seed},
        monitor.conditions,
        (*monitor.marks, *noise_marks(timing, batch)),
    )


def build_failed_measurement(
    kind: Kind, opened: LoadedTarget, case: dict[str, Scalar], error: BaseException
) -> Measurement:
    """The line of a batch size that could not be timed, for want of memory as a rule: no figures, and why."""
    marks = (f"{FAILED}: {str(error) or 'out of memory'}",)
    return Measurement(kind, opened.target, case, {}, timed=opened.timed, marks=marks, **provenance())


def time_stages(opened: LoadedTarget, batch: int, options: TimingOptions) -> dict[str, Figure]:
    """Median milliseconds of a batch's stages, from calls of their own that wait for each stage; {} where unknown.

    Only for a session that was just timed at this batch size, and so is warm.
    """
    session = opened.session
    if opened.target.device == "cpu" or not isinstance(session, StagedSession):
        return {}
    batches = random_batches(options.buffers, batch, opened.metadata.input_size, seed=options.seed)
    found = [session.run_staged(batches[number % len(batches)])[1] for number in range(_STAGED_CALLS)]
    figures = {}
    for name in ("host_to_device", "compute", "device_to_host"):
        values = [1e3 * seconds for stages in found if (seconds := getattr(stages, name)) is not None]
        if values:
            figures[f"{name}_ms"] = Figure(percentile(values, 50), "ms", "lower")
    return figures


def rotate_inputs(opened: LoadedTarget, batch: int, buffers: int, seed: int) -> Callable[[int], object]:
    """A call that answers another batch of noise each time, for as many as there are."""
    batches = random_batches(buffers, batch, opened.metadata.input_size, seed=seed)
    return lambda number: opened.session.run(batches[number % len(batches)])


def noise_marks(timing: Timing, batch: int) -> tuple[str, ...]:
    """The mark of a machine that was not quiet: repeats that differ by more than NOISY_SPREAD."""
    figure = Figure.of_repeats(timing.rates(batch), "images/s")
    if figure.spread is not None and figure.spread > NOISY_SPREAD:
        return (f"{NOISY}: the repeats differ by {figure.spread:.0%}",)
    return ()
