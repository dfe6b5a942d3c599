"""Throughput over batch sizes, each with its share of the hardware's ceiling, and MLPerf's offline scenario.

In the offline scenario all images are at hand from the start: the best throughput of any batch size. MLPerf runs it for
at least a minute; here it is the best of the sweep, with each batch size timed as its own measurement says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.bench.batch_timing import BatchTiming, build_failed_measurement, time_batch
from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Scalar, read_measurements
from opal_deploy.bench.roofline.ceiling import Ceiling, compute_share
from opal_deploy.bench.roofline.measure import read_ceiling
from opal_deploy.bench.roofline.work import Work, count_model_work
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.bench.timing import TimingOptions
from opal_deploy.errors import StoppedEarly, UsageError

OFFLINE = "offline"


@dataclass(frozen=True)
class MeasuredCeiling:
    """A measured ceiling with the device and the number of threads that it holds for."""

    ceiling: Ceiling
    device: str
    threads: Scalar

    def applies_to(self, loaded: LoadedTarget) -> bool:
        """Return whether a model runs on the same device with the same threads."""
        return self.device == loaded.target.device and self.threads in (None, loaded.threads)


def read_ceilings(path: Path) -> list[MeasuredCeiling]:
    """Read the ceilings that `bench roofline --measure-ceiling` wrote into a file, the latest first.

    Raises:
        UsageError: the file cannot be read, or has no ceiling.
    """
    ceilings = [
        MeasuredCeiling(read_ceiling(measurement), measurement.target.device, measurement.case.get("threads"))
        for measurement in read_measurements([path])
        if measurement.kind == "ceiling" and measurement.target is not None
    ]
    if not ceilings:
        raise UsageError(
            f"{path}: no ceiling in it; measure one: opal-deploy bench roofline --measure-ceiling --out {path.name}"
        )
    return ceilings[::-1]


def measure_throughput(
    loaded: LoadedTarget, batches: Sequence[int], options: TimingOptions, ceilings: Sequence[MeasuredCeiling] = ()
) -> Iterator[Measurement]:
    """Yield one measurement a batch size as soon as it is taken, then one of the best: the offline scenario.

    A batch size that fails, usually for lack of memory, has a measurement without figures and ends the sweep.

    Args:
        loaded: the model.
        batches: ascending.
        options: how each is timed.
        ceilings: measured on this machine; for other devices the data sheets of known GPUs serve.
    """
    ceiling = next((c.ceiling for c in ceilings if c.applies_to(loaded)), None)
    work = count_model_work(loaded.metadata)
    best: BatchTiming | None = None
    for batch in batches:
        try:
            timing = time_batch(loaded, batch, options)
        except (StoppedEarly, MemoryError) as error:
            yield build_failed_measurement("throughput", loaded, {"batch": batch, "threads": loaded.threads}, error)
            break
        if best is None or timing.throughput.value > best.throughput.value:
            best = timing
        yield _build_measurement(loaded, timing, work, ceiling)
    if best is not None:
        yield Measurement(
            kind="throughput",
            target=loaded.target,
            case={"scenario": OFFLINE, "threads": loaded.threads},
            figures={"images_per_second": best.throughput, "best_batch": Figure(best.batch, "images")},
            settings={"batches": list(batches), "scenario": "best throughput of the batch sizes tried"},
            timed=loaded.timed,
            marks=best.marks,
            **provenance(),
        )


def _build_measurement(
    loaded: LoadedTarget, timing: BatchTiming, work: Work | None, ceiling: Ceiling | None
) -> Measurement:
    target = loaded.target
    figures = {
        "images_per_second": timing.throughput,
        "p50_ms": timing.latency(50),
        "p99_ms": timing.latency(99),
        "peak_memory": Figure(timing.peak_megabytes, "MB", "lower"),
    }
    details: dict[str, Any] = {}
    reached = None
    if work is not None:
        reached = compute_share(work, timing.batch, target.precision, target.device, timing.throughput.value, ceiling)
    if reached is not None:
        figures["share_of_ceiling"] = Figure(100 * reached.fraction, "%", "higher")
        details["ceiling"] = {
            "images_per_second": reached.ceiling, "bound": reached.bound, "source": reached.source,
        }  # fmt: skip
    return Measurement(
        kind="throughput",
        target=target,
        case={"batch": timing.batch, "threads": loaded.threads},
        figures=figures,
        settings=timing.settings,
        timed=loaded.timed,
        marks=timing.marks,
        conditions=timing.conditions,
        details=details,
        **provenance(),
    )
