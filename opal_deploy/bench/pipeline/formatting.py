"""A measured case as text for people and as one measurement."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import NOISY, Better, Figure, Measurement, Scalar
from opal_deploy.bench.monitor import Monitor
from opal_deploy.bench.options import PipelineOptions
from opal_deploy.bench.pipeline.bottleneck import Pass
from opal_deploy.bench.pipeline.cases import COPY_QUALITY
from opal_deploy.bench.pipeline.measure import EXPLAIN, INFER, CaseResult, Variant
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.inference.timing import STAGES, Stage, StageTime

GROWING = "growing memory"
TIMED = (
    "bare: the session on decoded batches, on a GPU in page-locked memory with several batches in flight; infer and "
    "infer_explain: from the first file to the last record on disk, including the start of decode processes; files in "
    "the system's cache, model loaded and warm; plain: a loop of Pillow, torchvision's transforms and PyTorch eager in "
    "one process"
)
_TITLES = {INFER: "infer", EXPLAIN: "infer --explain"}
_RATES = ("bare", INFER, EXPLAIN, "plain")


def build_measurement(
    result: CaseResult, loaded: LoadedTarget, monitor: Monitor, options: PipelineOptions
) -> Measurement:
    """Return the measurement; `monitor` sampled the machine during it."""
    figures = _figures(result)
    marks = [NOISY] if any(figures[name].is_noisy for name in _RATES if name in figures) else []
    marks += [f"{GROWING}: {variant.name}" for variant in result.variants if variant.memory.grows]
    case: dict[str, Scalar] = {
        "images": result.images,
        "batch": result.case.batch,
        "workers": result.case.workers,
        "threads": loaded.threads,
        "image_size": result.case.size_name,
        "network": options.network,
        "decoding": options.decoding,
        "hold_ms": options.hold_ms,
        "decode": str(result.case.decode),
        "isolate": result.case.isolate,
    }
    return Measurement(
        kind="pipeline",
        target=loaded.target,
        case=case,
        figures=figures,
        settings={"repeats": options.repeats, "order": "interleaved", "copies": f"JPEG quality {COPY_QUALITY}"},
        timed=TIMED,
        marks=(*marks, *monitor.marks),
        conditions=monitor.conditions,
        details=_details(result),
        **provenance(),
    )


def format_result(result: CaseResult, marks: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield lines for a person."""
    yield f"{result.images} of {result.given} images, {result.case.describe()}; {result.session}"
    figures = _figures(result)
    if result.bare:
        yield f"  {_format_rate('bare session', figures['bare'])}"
    if result.baseline:
        yield f"  {_format_rate('plain script (PyTorch and Pillow)', figures['plain'])}"
    for variant in result.variants:
        share = figures.get(f"{variant.name}_share")
        compared = f": {share.value:.1%} of the bare session" if share else ""
        if over := figures.get(f"{variant.name}_over_plain"):
            compared += f", {over.value:.2f} x the plain script"
        if use := figures.get(f"{variant.name}.gpu_use"):
            compared += f", GPU {use.value:.0f} % busy"
        yield f"  {_format_rate(_TITLES[variant.name], figures[variant.name])}{compared}"
        yield f"    {variant.bottleneck.describe()}"
        yield f"    {variant.memory.describe()}"
        yield f"    {_format_stages(variant, 'wall', 'ms per image by stage')}"
        yield f"    {_format_stages(variant, 'cpu', 'of CPU time')}"
    yield f"  peak memory {result.peak_megabytes:.0f} MB"
    yield from (f"  marked {mark}" for mark in marks)


def format_summary(results: list[CaseResult]) -> Iterator[str]:
    """Yield one line per case, for several cases."""
    for result in results:
        figures = _figures(result)
        rates = ", ".join(
            f"{_TITLES[v.name]} {figures[v.name].value:.1f} images/s"
            + (f" ({share.value:.0%} of the bare session)" if (share := figures.get(f"{v.name}_share")) else "")
            for v in result.variants
        )
        yield f"{result.case.describe()}: {rates}, peak {result.peak_megabytes:.0f} MB"


def _figures(result: CaseResult) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    if result.bare:
        figures["bare"] = _figure(result.bare, lambda one: one.rate, "images/s", "higher")
    for variant in result.variants:
        figures[variant.name] = _figure(variant.passes, lambda one: one.rate, "images/s", "higher")
    for variant in result.variants:
        if result.bare:
            # ratios of consecutive passes, so that a slower machine cancels out
            shares = (one.rate / bare.rate for one, bare in zip(variant.passes, result.bare, strict=True))
            figures[f"{variant.name}_share"] = Figure.of_repeats(shares, "ratio", "higher")
    if result.baseline:
        figures["plain"] = _figure(result.baseline, lambda one: one.rate, "images/s", "higher")
        for variant in result.variants:
            ratios = (one.rate / plain.rate for one, plain in zip(variant.passes, result.baseline, strict=True))
            figures[f"{variant.name}_over_plain"] = Figure.of_repeats(ratios, "ratio", "higher")
    for variant in result.variants:
        use = [one.gpu_use for one in variant.passes if one.gpu_use is not None]
        if use:
            figures[f"{variant.name}.gpu_use"] = Figure.of_repeats(use, "%", "higher")
    figures |= result.stages
    figures["peak_memory"] = Figure(result.peak_megabytes, "MB", "lower")
    if result.bare:
        figures["bare.cpu"] = _figure(result.bare, _cpu_ms, "ms/image", "lower")
    for variant in result.variants:
        figures[f"{variant.name}.cpu"] = _figure(variant.passes, _cpu_ms, "ms/image", "lower")
        for stage in _stages(variant):
            # wall time includes waiting for a core or the interpreter lock, so less is not always better
            directions: tuple[tuple[str, Better | None], ...] = (("wall", None), ("cpu", "lower"))
            for kind, better in directions:
                values = [_stage_ms(one, stage, kind) for one in variant.passes]
                figures[f"{variant.name}.{stage}.{kind}"] = Figure.of_repeats(values, "ms/image", better)
    return figures


def _figure(passes: tuple[Pass, ...], value: Callable[[Pass], float], unit: str, better: Better) -> Figure:
    return Figure.of_repeats((value(one) for one in passes), unit, better)


def _cpu_ms(one: Pass) -> float:
    return 1000 * one.cpu_seconds / one.images


def _stages(variant: Variant) -> list[Stage]:
    return [stage for stage in STAGES if any(one.times.sum_stage(stage) for one in variant.passes)]


def _stage_ms(one: Pass, stage: Stage, kind: str) -> float:
    row: StageTime | None = one.times.sum_stage(stage)
    return 0.0 if row is None else 1000 * float(getattr(row, kind)) / one.images


def _details(result: CaseResult) -> dict[str, Any]:
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
