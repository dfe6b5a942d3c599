"""How long one batch takes from call to answer: percentiles, and MLPerf's single-stream scenario."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opal_deploy.bench.batch_timing import PERCENTILES, BatchTiming, TimingOptions, failed, time_batch, time_stages
from opal_deploy.bench.harness.machine import provenance
from opal_deploy.bench.record import Figure, Measurement, Scalar
from opal_deploy.bench.subjects.opening import Opened
from opal_deploy.errors import StoppedEarly

SINGLE_STREAM = "single-stream"


def over_batches(opened: Opened, batches: Sequence[int], options: TimingOptions) -> Iterator[Measurement]:
    """A line a batch size, as soon as it is measured; one that fails has a line that says why, and is the last."""
    for batch in batches:
        line = _line(opened, batch, options, {"batch": batch, "threads": opened.threads})
        yield line
        if not line.figures:
            return


def single_stream(opened: Opened, options: TimingOptions) -> Measurement:
    """One picture at a time, the next as soon as the last is answered; the scenario's figure is the 90th percentile.

    MLPerf's runs are longer: at least 1,024 queries and a minute.
    """
    case: dict[str, Scalar] = {"scenario": SINGLE_STREAM, "batch": 1, "threads": opened.threads}
    return _line(opened, 1, options, case)


def _line(opened: Opened, batch: int, options: TimingOptions, case: dict[str, Scalar]) -> Measurement:
    try:
        found = time_batch(opened, batch, options)
        stages = time_stages(opened, batch, options)
    except (StoppedEarly, MemoryError) as error:
        return failed("latency", opened, case, error)
    return Measurement(
        kind="latency",
        subject=opened.subject,
        case=case,
        figures={**_figures(found), **stages},
        settings=found.settings,
        timed=opened.timed,
        marks=found.marks,
        conditions=found.conditions,
        **provenance(),
    )


def _figures(found: BatchTiming) -> dict[str, Figure]:
    return {
        **{f"p{percent}_ms": found.latency(percent) for percent in PERCENTILES},
        "mean_ms": found.mean_latency,
        "images_per_second": found.throughput,
        "peak_memory": Figure(found.peak_megabytes, "MB", "lower"),
    }
