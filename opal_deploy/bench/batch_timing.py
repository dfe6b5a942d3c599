"""Time one model at one batch size; `bench latency` and `bench throughput` share this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import NOISY, NOISY_SPREAD, Figure, Kind, Measurement, Scalar
from opal_deploy.bench.memory import peak_memory_mb, reset_peak_memory
from opal_deploy.bench.monitor import monitor_devices
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.bench.timing import Timing, TimingOptions, random_batches, time_repeats
from opal_deploy.runtime.session import ImageBatch, PaddingSession, Session, StagedSession, pinned
from opal_deploy.statistics import mean, percentile

FAILED = "failed"
PERCENTILES = (50, 90, 95, 99)
# calls after the timed ones, from which the stages are measured
_STAGED_CALLS = 20


@dataclass(frozen=True)
class BatchTiming:
    """The timing of one model at one batch size.

    Attributes:
        batch: images a call.
        timing: every call.
        peak_megabytes: peak resident memory of the process, model included.
        settings, conditions, marks: as in `Measurement`.
    """

    batch: int
    timing: Timing
    peak_megabytes: float
    settings: dict[str, Any]
    conditions: dict[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()

    @property
    def throughput(self) -> Figure:
        """Images per second, one value a repeat."""
        return Figure.of_repeats(self.timing.rates(self.batch), "images/s", "higher")

    def latency(self, percent: float) -> Figure:
        """Return a percentile of the calls' milliseconds, over all repeats and in each."""
        repeats = tuple(1e3 * percentile(calls, percent) for calls in self.timing.repeats)
        return Figure(1e3 * percentile(self.timing.latencies, percent), "ms", "lower", repeats)

    @property
    def mean_latency(self) -> Figure:
        """Mean milliseconds a call, over all repeats and in each."""
        repeats = tuple(1e3 * mean(calls) for calls in self.timing.repeats)
        return Figure(1e3 * mean(self.timing.latencies), "ms", "lower", repeats)


def time_batch(loaded: LoadedTarget, batch: int, options: TimingOptions) -> BatchTiming:
    """Time one model at one batch size.

    Raises:
        StoppedEarly: memory is full, or the device was lost.
    """
    reset_peak_memory()
    with (
        rotate_inputs(loaded, batch, options.buffers, options.seed) as call,
        monitor_devices(loaded.target.device) as monitor,
    ):
        timing = time_repeats(call, options)
    return BatchTiming(
        batch,
        timing,
        peak_memory_mb(),
        {**timing.settings(), "buffers": options.buffers, "seed": options.seed},
        monitor.conditions,
        (*monitor.marks, *noise_marks(timing, batch)),
    )


def time_stages(loaded: LoadedTarget, batch: int, options: TimingOptions) -> dict[str, Figure]:
    """Return median milliseconds of the copies to and from a GPU and of its computing; empty where unknown.

    The stages are waited for one by one in calls of their own. The session must be warm at this batch size.
    """
    if loaded.target.device == "cpu":
        return {}
    with pinned_noise(loaded, options.buffers, batch, options.seed) as batches:
        return time_stages_of(loaded.session, batches)


def time_stages_of(session: Session, batches: Sequence[ImageBatch]) -> dict[str, Figure]:
    """Return the figures of `time_stages` for a session on a GPU and its batches, which lie in page-locked memory."""
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
def rotate_inputs(loaded: LoadedTarget, batch: int, buffers: int, seed: int) -> Iterator[Callable[[int], object]]:
    """Make a call that runs the session on the next of `buffers` batches of noise each time, none of it padded."""
    if isinstance(loaded.session, PaddingSession):
        loaded.session.add_batch_size(batch)
    with pinned_noise(loaded, buffers, batch, seed) as batches:
        yield lambda number: loaded.session.run(batches[number % len(batches)])


@contextmanager
def pinned_noise(loaded: LoadedTarget, count: int, batch: int, seed: int) -> Iterator[list[ImageBatch]]:
    """Make batches of noise for a session, page-locked where it has a GPU, as those of `infer` are.

    Without it every batch is copied once more, by the host and at its speed, which hides differences on the device.
    """
    batches = random_batches(count, batch, loaded.metadata.input_size, seed=seed)
    with ExitStack() as stack:
        for images in batches:
            stack.enter_context(pinned(loaded.session, images))
        yield batches


def noise_marks(timing: Timing, batch: int) -> tuple[str, ...]:
    """Return the mark of a noisy machine where the repeats' rates differ by more than NOISY_SPREAD."""
    figure = Figure.of_repeats(timing.rates(batch), "images/s")
    if figure.spread is not None and figure.spread > NOISY_SPREAD:
        return (f"{NOISY}: the repeats differ by {figure.spread:.0%}",)
    return ()


def build_failed_measurement(
    kind: Kind, loaded: LoadedTarget, case: dict[str, Scalar], error: BaseException
) -> Measurement:
    """Return a measurement without figures for a batch size that failed, usually for lack of memory."""
    marks = (f"{FAILED}: {str(error) or 'out of memory'}",)
    return Measurement(kind, loaded.target, case, {}, timed=loaded.timed, marks=marks, **provenance())
