"""Latency and throughput of one model, and the ratio of several models' throughputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from opal_deploy.bench import timing
from opal_deploy.bench.measurement import Figure, Measurement, Scalar
from opal_deploy.bench.models import TimedModel
from opal_deploy.bench.options import SweepOptions
from opal_deploy.bench.timing import Progress, Run
from opal_deploy.errors import StoppedEarly

_RESAMPLES = 10_000
SweepKind = Literal["latency", "throughput"]
_METHOD = (
    "rounds in the order A B, then B A, and so on; each run starts with one uncounted batch; ratio within each round; "
    "median over rounds with a 95 % percentile bootstrap interval; the two rates include the machine's drift"
)


def measure_speed(
    kind: SweepKind, model: TimedModel, options: SweepOptions, progress: Progress = lambda done, total: None
) -> Iterator[Measurement]:
    """Yield one measurement per batch size as soon as it is taken; `latency` waits for each batch before the next.

    A batch size that fails, usually for lack of memory, has no figures and is the last.
    """
    for batch in options.batch:
        case: dict[str, Scalar] = {"batch": batch, "threads": model.threads}
        try:
            fields = _measure_batch(kind, model, batch, options, progress)
        except (StoppedEarly, MemoryError) as error:
            yield Measurement(kind, model.target, case, {}, marks=(f"failed: {str(error) or 'out of memory'}",))
            return
        yield Measurement(kind, model.target, case, **fields)


def _measure_batch(
    kind: SweepKind, model: TimedModel, batch: int, options: SweepOptions, progress: Progress
) -> dict[str, Any]:
    """Return the fields of the `Measurement` of one batch size."""
    devices = [model.target.device]
    before = timing.read_gpus(devices)
    with timing.pinned_noise(model.session, options.buffers, batch) as images:
        (timed,) = timing.time_runs([Run(model.session, images, one_by_one=kind == "latency")], options, progress)
        after = timing.read_gpus(devices)
    rate = timed.throughput(batch)
    percentiles = {f"p{percent}_ms": timed.latency(percent) for percent in (50, 90, 95, 99)}
    return {
        "figures": {**percentiles, "mean_ms": timed.latency(), "images_per_second": rate},
        "settings": {**timed.settings(), "buffers": options.buffers},
        "timed": model.describe_timing(timed.depth),
        "marks": (*timing.find_throttling(after), *rate.marks),
        "conditions": {"before": before, "after": after} if before else {},
    }  # fmt: skip


def measure_comparison(
    models: Sequence[TimedModel], batch: int, options: SweepOptions, progress: Progress = lambda done, total: None
) -> Iterator[Measurement]:
    """Time models in interleaved rounds, and yield one measurement per model but the first, with its ratio to that.

    A round's ratio is the model's images per second divided by the first's, so that the machine's drift cancels out.
    """
    devices = [model.target.device for model in models]
    before = timing.read_gpus(devices)
    with ExitStack() as stack:
        noise = [stack.enter_context(timing.pinned_noise(m.session, options.buffers, batch)) for m in models]
        runs = [Run(model.session, images) for model, images in zip(models, noise, strict=True)]
        reference, *others = timing.time_runs(runs, options, progress)
    after, first = timing.read_gpus(devices), models[0]
    reference_rate = reference.throughput(batch)
    reference_name = f"{first.target.name}, {first.target.runtime}, {first.target.precision}"
    for model, timed in zip(models[1:], others, strict=True):
        rate = timed.throughput(batch)
        # pair by pair, so that drift between pairs cancels
        ratios = tuple(new / old for new, old in zip(rate.repeats, reference_rate.repeats, strict=True))
        ratio = Figure(float(np.median(ratios)), "ratio", "higher", ratios, median_interval(ratios))
        yield Measurement(
            "compare",
            model.target,
            {"reference": reference_name, "batch": batch, "threads": model.threads},
            {"ratio": ratio, "images_per_second": rate, "reference_images_per_second": reference_rate},
            settings={
                **timed.settings(), "method": _METHOD, "reference": reference.settings(), "buffers": options.buffers
            },
            timed=model.describe_timing(timed.depth),
            marks=(*timing.find_throttling(after), *ratio.marks),
            conditions={"before": before, "after": after} if before else {},
            details={"reference": asdict(first.target), "reference_timed": first.describe_timing(reference.depth)},
        )  # fmt: skip


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median of independent values, from a fixed seed."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)
