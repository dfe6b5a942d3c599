"""Latency of one batch from call to outputs: percentiles over batch sizes, and MLPerf's single-stream scenario."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opal_deploy.bench.batch_timing import PERCENTILES, BatchTiming, build_failed_measurement, time_batch, time_stages
from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Scalar
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.bench.timing import TimingOptions
from opal_deploy.errors import StoppedEarly

SINGLE_STREAM = "single-stream"


def measure_latency(loaded: LoadedTarget, batches: Sequence[int], options: TimingOptions) -> Iterator[Measurement]:
    """Yield one measurement a batch size; one that fails has no figures and is the last."""
    for batch in batches:
        measurement = _measure(loaded, batch, options, {"batch": batch, "threads": loaded.threads})
        yield measurement
        if not measurement.figures:
            return


def measure_single_stream(loaded: LoadedTarget, options: TimingOptions) -> Measurement:
    """Measure one image at a time; the scenario's figure is the 90th percentile.

    MLPerf's runs are longer: at least 1,024 queries and a minute.
    """
    case: dict[str, Scalar] = {"scenario": SINGLE_STREAM, "batch": 1, "threads": loaded.threads}
    return _measure(loaded, 1, options, case)


def _measure(loaded: LoadedTarget, batch: int, options: TimingOptions, case: dict[str, Scalar]) -> Measurement:
    try:
        timing = time_batch(loaded, batch, options)
        stages = time_stages(loaded, batch, options)
    except (StoppedEarly, MemoryError) as error:
        return build_failed_measurement("latency", loaded, case, error)
    return Measurement(
        kind="latency",
        target=loaded.target,
        case=case,
        figures={**_figures(timing), **stages},
        settings=timing.settings,
        timed=loaded.timed,
        marks=timing.marks,
        conditions=timing.conditions,
        **provenance(),
    )


def _figures(timing: BatchTiming) -> dict[str, Figure]:
    return {
        **{f"p{percent}_ms": timing.latency(percent) for percent in PERCENTILES},
        "mean_ms": timing.mean_latency,
        "images_per_second": timing.throughput,
        "peak_memory": Figure(timing.peak_megabytes, "MB", "lower"),
    }
