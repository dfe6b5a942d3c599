"""Images per second over batch sizes, each with its share of what the hardware could do; MLPerf's offline scenario.

Offline is all pictures at hand from the start: the best throughput of any batch size. MLPerf runs it for at least a
minute; here it is the best of the sweep, each batch size timed as its own line says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.bench.batch_timing import BatchTiming, TimingOptions, build_failed_measurement, time_batch
from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Scalar, read_measurements
from opal_deploy.bench.roofline.ceiling import Ceiling, Share, compute_share
from opal_deploy.bench.roofline.measure import read_ceiling
from opal_deploy.bench.roofline.work import Work, count_model_work
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.errors import StoppedEarly, UsageError

OFFLINE = "offline"


@dataclass(frozen=True)
class MeasuredCeiling:
    """A ceiling with the device and the threads that it was measured on."""

    ceiling: Ceiling
    device: str
    threads: Scalar

    def fits(self, opened: LoadedTarget) -> bool:
        """Whether a model runs on just that."""
        return self.device == opened.target.device and self.threads in (None, opened.threads)


def read_ceilings(path: Path) -> list[MeasuredCeiling]:
    """What `bench roofline --measure-ceiling` wrote into a file, the latest first.

    Raises:
        UsageError: it cannot be read, or holds none.
    """
    found = [
        MeasuredCeiling(read_ceiling(line), line.target.device, line.case.get("threads"))
        for line in read_measurements([path])
        if line.kind == "ceiling" and line.target is not None
    ]
    if not found:
        raise UsageError(
            f"{path}: no ceiling in it; measure one: opal-deploy bench roofline --measure-ceiling --out {path.name}"
        )
    return found[::-1]


def measure_throughput(
    opened: LoadedTarget, batches: Sequence[int], options: TimingOptions, ceilings: Sequence[MeasuredCeiling] = ()
) -> Iterator[Measurement]:
    """A line a batch size as soon as it is measured, then one for the best: offline.

    A batch size that fails, for want of memory as a rule, has a line that says so, and larger ones are not tried.

    Args:
        opened: the model.
        batches: ascending.
        options: how each is timed.
        ceilings: measured on this machine; for other devices, those of known GPUs.
    """
    ceiling = next((c.ceiling for c in ceilings if c.fits(opened)), None)
    work = count_model_work(opened.metadata)
    best: tuple[int, Figure] | None = None
    doubts: tuple[str, ...] = ()
    for batch in batches:
        try:
            found = time_batch(opened, batch, options)
        except (StoppedEarly, MemoryError) as error:
            yield build_failed_measurement("throughput", opened, {"batch": batch, "threads": opened.threads}, error)
            break
        if best is None or found.throughput.value > best[1].value:
            best, doubts = (batch, found.throughput), found.marks
        yield _row(opened, found, work, ceiling)
    if best is not None:
        batch, figure = best
        yield Measurement(
            kind="throughput",
            target=opened.target,
            case={"scenario": OFFLINE, "threads": opened.threads},
            figures={"images_per_second": figure, "best_batch": Figure(batch, "images")},
            settings={"batches": list(batches), "scenario": "best throughput of the batch sizes tried"},
            timed=opened.timed,
            marks=doubts,
            **provenance(),
        )


def _row(opened: LoadedTarget, found: BatchTiming, work: Work | None, ceiling: Ceiling | None) -> Measurement:
    target = opened.target
    figures = {
        "images_per_second": found.throughput,
        "p50_ms": found.latency(50),
        "p99_ms": found.latency(99),
        "peak_memory": Figure(found.peak_megabytes, "MB", "lower"),
    }
    details: dict[str, Any] = {}
    reached = None
    if work is not None:
        reached = compute_share(work, found.batch, target.precision, target.device, found.throughput.value, ceiling)
    if reached is not None:
        figures["share_of_ceiling"] = Figure(100 * reached.fraction, "%", "higher")
        details["ceiling"] = _ceiling_details(reached)
    return Measurement(
        kind="throughput",
        target=target,
        case={"batch": found.batch, "threads": opened.threads},
        figures=figures,
        settings=found.settings,
        timed=opened.timed,
        marks=found.marks,
        conditions=found.conditions,
        details=details,
        **provenance(),
    )


def _ceiling_details(reached: Share) -> dict[str, Any]:
    return {
        "images_per_second": reached.ceiling,
        "bound": reached.bound,
        "source": reached.source,
    }
