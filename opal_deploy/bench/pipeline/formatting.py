"""The result of `bench pipeline` as text for people and as one measurement."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import NOISY, Better, Figure, Measurement, Scalar
from opal_deploy.bench.monitor import Monitor
from opal_deploy.bench.options import PipelineOptions
from opal_deploy.bench.pipeline.bottleneck import Pass
from opal_deploy.bench.pipeline.measure import EXPLAIN, INFER, PipelineResult, Variant
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.timing import STAGES, Stage, StageTime

GROWING = "growing memory"
TIMED = (
    "bare: the session on decoded batches, on a GPU in page-locked memory with several batches in flight; infer and "
    "infer_explain: from the first file to the last record on disk, including the start of decode processes; files in "
    "the system's cache, model loaded and warm"
)
_TITLES = {INFER: "infer", EXPLAIN: "infer --explain"}
_RATES = ("bare", INFER, EXPLAIN)


def build_measurement(
    result: PipelineResult, loaded: LoadedTarget, monitor: Monitor, options: PipelineOptions
) -> Measurement:
    """Return the measurement; `monitor` sampled the machine during it."""
    figures = _figures(result)
    marks = [NOISY] if any(figures[name].is_noisy for name in _RATES if name in figures) else []
    marks += [f"{GROWING}: {variant.name}" for variant in result.variants if variant.memory.grows]
    case: dict[str, Scalar] = {
        "images": result.images, "batch": options.batch, "workers": result.workers, "threads": loaded.threads,
        "network": options.network, "decode": options.decode, "isolate": options.isolate,
    }  # fmt: skip
    return Measurement(
        kind="pipeline",
        target=loaded.target,
        case=case,
        figures=figures,
        settings={"repeats": options.repeats, "order": "interleaved"},
        timed=TIMED,
        marks=(*marks, *monitor.marks),
        conditions=monitor.conditions,
        details=_details(result),
        **provenance(),
    )


def format_result(result: PipelineResult, marks: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield lines for a person."""
    yield f"{result.images} of {result.given} images; {result.session}"
    figures = _figures(result)
    if result.bare:
        yield f"  {_format_rate('bare session', figures['bare'])}"
    for variant in result.variants:
        share = figures.get(f"{variant.name}_share")
        compared = f": {share.value:.1%} of the bare session" if share else ""
        if use := figures.get(f"{variant.name}.gpu_use"):
            compared += f", GPU {use.value:.0f} % busy"
        yield f"  {_format_rate(_TITLES[variant.name], figures[variant.name])}{compared}"
        yield f"    {variant.bottleneck.describe()}"
        yield f"    {variant.memory.describe()}"
        yield f"    {_format_stages(variant, 'wall', 'ms per image by stage')}"
        yield f"    {_format_stages(variant, 'cpu', 'of CPU time')}"
    yield f"  peak memory {result.peak_megabytes:.0f} MB"
    yield from (f"  marked {mark}" for mark in marks)


def _figures(result: PipelineResult) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    named = {"bare": result.bare, **{variant.name: variant.passes for variant in result.variants}}
    for name, passes in named.items():
        if passes:
            figures[name] = Figure.of_repeats([one.rate for one in passes], "images/s", "higher")
    for variant in result.variants if result.bare else ():
        # ratios of consecutive passes, so that a slower machine cancels out
        shares = (one.rate / bare.rate for one, bare in zip(variant.passes, result.bare, strict=True))
        figures[f"{variant.name}_share"] = Figure.of_repeats(shares, "ratio", "higher")
    for variant in result.variants:
        if use := [one.gpu_use for one in variant.passes if one.gpu_use is not None]:
            figures[f"{variant.name}.gpu_use"] = Figure.of_repeats(use, "%", "higher")
    figures |= result.stages
    figures["peak_memory"] = Figure(result.peak_megabytes, "MB", "lower")
    if result.bare:
        figures["bare.cpu"] = _cpu_time(result.bare)
    for variant in result.variants:
        figures[f"{variant.name}.cpu"] = _cpu_time(variant.passes)
        for stage in _stages(variant):
            # wall time includes waiting for a core or the interpreter lock, so less is not always better
            directions: tuple[tuple[str, Better | None], ...] = (("wall", None), ("cpu", "lower"))
            for kind, better in directions:
                values = [_stage_ms(one, stage, kind) for one in variant.passes]
                figures[f"{variant.name}.{stage}.{kind}"] = Figure.of_repeats(values, "ms/image", better)
    return figures


def _cpu_time(passes: Iterable[Pass]) -> Figure:
    return Figure.of_repeats((1000 * one.cpu_seconds / one.images for one in passes), "ms/image", "lower")


def _stages(variant: Variant) -> list[Stage]:
    return [stage for stage in STAGES if any(one.times.sum_stage(stage) for one in variant.passes)]


def _stage_ms(one: Pass, stage: Stage, kind: str) -> float:
    row: StageTime | None = one.times.sum_stage(stage)
    return 0.0 if row is None else 1000 * float(getattr(row, kind)) / one.images


def _details(result: PipelineResult) -> dict[str, Any]:
    return {
        "session": result.session,
        "given": result.given,
        "bound": {variant.name: variant.bottleneck.to_dict() for variant in result.variants},
        "memory": {variant.name: variant.memory.to_dict() for variant in result.variants},
        "last_pass": {variant.name: variant.passes[-1].times.to_dict() for variant in result.variants},
    }


def _format_rate(name: str, figure: Figure) -> str:
    repeats = "once" if figure.spread is None else f"spread {figure.spread:.0%} over {len(figure.repeats)}"
    noisy = ", NOISY" if figure.is_noisy else ""
    return f"{name}: {figure.value:.1f} images/s ({repeats}{noisy})"


def _format_stages(variant: Variant, kind: str, title: str) -> str:
    parts = [
        f"{stage} {statistics.median(_stage_ms(one, stage, kind) for one in variant.passes):.2f}"
        for stage in _stages(variant)
    ]
    return f"{title}: {', '.join(parts)}"
