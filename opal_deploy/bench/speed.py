"""Latency and throughput of one model over batch sizes, and the lines that the commands print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Scalar
from opal_deploy.bench.options import TimingOptions
from opal_deploy.bench.profile import check_profile, format_profile, profile_batch
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.bench.timing import BatchTiming, time_batch, time_stages
from opal_deploy.errors import StoppedEarly

SweepKind = Literal["latency", "throughput"]
FAILED = "failed"
_PERCENTILES = (50, 90, 95, 99)
_STAGES = {"host_to_device_ms": "to the device", "compute_ms": "compute", "device_to_host_ms": "back"}


def measure_latency(
    loaded: LoadedTarget, batches: Sequence[int], options: TimingOptions, *, profile: bool = False
) -> Iterator[Measurement]:
    """Yield one measurement per batch size; one that fails, usually for lack of memory, has no figures and ends.

    Args:
        profile: also time every node, see `profile.profile_batch`.

    Raises:
        UsageError: this model cannot be profiled.
    """
    if profile:
        check_profile(loaded)

    def build(timing: BatchTiming) -> Measurement:
        profiled = profile_batch(loaded, timing.batch) if profile else None
        figures = {
            **{f"p{percent}_ms": timing.latency(percent) for percent in _PERCENTILES},
            "mean_ms": timing.mean_latency,
            "images_per_second": timing.throughput,
            "peak_memory": Figure(timing.peak_megabytes, "MB", "lower"),
            **time_stages(loaded, timing.batch, options.buffers),
            **(profiled.figures() if profiled else {}),
        }
        details = {"profile": profiled.to_dict()} if profiled else {}
        return _build_measurement("latency", loaded, timing, figures, details)

    return _sweep("latency", loaded, batches, options, build)


def measure_throughput(loaded: LoadedTarget, batches: Sequence[int], options: TimingOptions) -> Iterator[Measurement]:
    """Yield one measurement per batch size; one that fails, usually for lack of memory, has no figures and ends."""

    def build(timing: BatchTiming) -> Measurement:
        figures = {
            "images_per_second": timing.throughput,
            "p50_ms": timing.latency(50),
            "p99_ms": timing.latency(99),
            "peak_memory": Figure(timing.peak_megabytes, "MB", "lower"),
        }
        return _build_measurement("throughput", loaded, timing, figures, {})

    return _sweep("throughput", loaded, batches, options, build)


def _sweep(
    kind: SweepKind,
    loaded: LoadedTarget,
    batches: Sequence[int],
    options: TimingOptions,
    build: Callable[[BatchTiming], Measurement],
) -> Iterator[Measurement]:
    """Yield a measurement per batch size as soon as it is taken; one that fails ends the sweep."""
    for batch in batches:
        try:
            yield build(time_batch(loaded, batch, options, one_by_one=kind == "latency"))
        except (StoppedEarly, MemoryError) as error:
            marks = (f"{FAILED}: {str(error) or 'out of memory'}",)
            case: dict[str, Scalar] = {"batch": batch, "threads": loaded.threads}
            timed = loaded.describe_timing(1 if kind == "latency" else loaded.depth)
            yield Measurement(kind, loaded.target, case, {}, timed=timed, marks=marks, **provenance())
            return


def format_speed(measurement: Measurement) -> str:
    """Return one line for a person, of a latency or a throughput, and the table of a profile."""
    batch, figures = measurement.case["batch"], measurement.figures
    if not figures:
        return f"  batch {batch}: {measurement.marks[0]}"
    text = _format_latency(figures) if measurement.kind == "latency" else _format_throughput(figures)
    line = f"  batch {batch}: {text}{''.join(f'; {mark}' for mark in measurement.marks)}"
    return "\n".join([line, *format_profile(measurement)])


def _format_latency(figures: dict[str, Figure]) -> str:
    names = [*(f"p{percent}_ms" for percent in _PERCENTILES), "mean_ms"]
    percentiles = ", ".join(f"{name.removesuffix('_ms')} {figures[name].value:.2f}" for name in names)
    stages = ", ".join(f"{title} {figures[name].value:.2f}" for name, title in _STAGES.items() if name in figures)
    rate = figures["images_per_second"]
    return (
        f"{percentiles} ms{f'; {stages} ms' * bool(stages)}; {rate.value:.2f} images/s{_format_spread(rate)}, "
        f"{figures['peak_memory'].value:.0f} MB"
    )


def _format_throughput(figures: dict[str, Figure]) -> str:
    rate = figures["images_per_second"]
    return (
        f"{rate.value:.2f} images/s{_format_spread(rate)}, p50 {figures['p50_ms'].value:.2f} ms, "
        f"p99 {figures['p99_ms'].value:.2f} ms, {figures['peak_memory'].value:.0f} MB"
    )


def _build_measurement(
    kind: SweepKind,
    loaded: LoadedTarget,
    timing: BatchTiming,
    figures: dict[str, Figure],
    details: dict[str, Any],
) -> Measurement:
    return Measurement(
        kind=kind,
        target=loaded.target,
        case={"batch": timing.batch, "threads": loaded.threads},
        figures=figures,
        settings=timing.settings,
        timed=loaded.describe_timing(timing.timing.depth),
        marks=timing.marks,
        conditions=timing.conditions,
        details=details,
        **provenance(),
    )


def _format_spread(figure: Figure) -> str:
    return "" if figure.spread is None else f" (spread {figure.spread:.1%} over {len(figure.repeats)})"
