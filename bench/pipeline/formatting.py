"""A measured case for people, and as one line of the common schema."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import NOISY, Better, Figure, Measurement, Scalar
from opal_deploy.bench.monitor import Monitor
from opal_deploy.bench.pipeline.bottleneck import Pass
from opal_deploy.bench.pipeline.cases import COPY_QUALITY
from opal_deploy.bench.pipeline.measure import INFER, CaseResult, Variant
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.inference.timing import STAGES, Stage, StageTime

TIMED = (
    "bare: one call of the session after the other on decoded batches; infer and infer_explain: from the first file to "
    "the last record on disk, with the start of decode processes where there are any; files in the system's cache, "
    "model loaded and warm; plain: a loop of Pillow, torchvision's transforms and PyTorch eager in one process"
)
GROWING = "growing memory"
_RATES = ("bare", "infer", "infer_explain", "plain")
_TITLES = {INFER: "infer", "infer_explain": "infer --explain"}


def build_measurement(
    result: CaseResult, opened: LoadedTarget, monitor: Monitor, *, repeats: int, network: bool
) -> Measurement:
    """One line of kind `pipeline`; `monitor` watched the machine meanwhile."""
    figures = _figures(result)
    marks = [NOISY] if any(figures[name].is_noisy for name in _RATES if name in figures) else []
    marks += [f"{GROWING}: {variant.name}" for variant in result.variants if variant.memory.grows]
    case: dict[str, Scalar] = {
        "images": result.images,
        "batch": result.case.batch,
        "workers": result.case.workers,
        "threads": opened.threads,
        "image_size": result.case.pictures,
        "network": network,
        "decode": str(result.case.decode),
        "isolate": result.case.isolate,
    }
    return Measurement(
        kind="pipeline",
        target=opened.target,
        case=case,
        figures=figures,
        settings={"repeats": repeats, "order": "interleaved", "copies": f"JPEG quality {COPY_QUALITY}"},
        timed=TIMED,
        marks=(*marks, *monitor.marks),
        conditions=monitor.conditions,
        details=_details(result),
        **provenance(),
    )


def format_result(result: CaseResult) -> Iterator[str]:
    """Lines for a person."""
    yield f"{result.images} of {result.given} pictures, {result.case.line()}; {result.session}"
    figures = _figures(result)
    if result.bare:
        yield f"  {_rate('session alone', figures['bare'])}"
    if result.plain:
        yield f"  {_rate('plain PyTorch and Pillow, one process', figures['plain'])}"
    for variant in result.variants:
        share = figures.get(f"{variant.name}_share")
        compared = f": {share.value:.1%} of the session alone" if share else ""
        if over := figures.get(f"{variant.name}_over_plain"):
            compared += f", {over.value:.2f} x plain PyTorch and Pillow"
        yield f"  {_rate(_TITLES[variant.name], figures[variant.name])}{compared}"
        yield f"    {variant.bound.line()}"
        yield f"    {variant.memory.line()}"
        yield f"    {_stage_line(variant, 'wall', 'milliseconds an image in each stage')}"
        yield f"    {_stage_line(variant, 'cpu', 'of processor time')}"
    yield f"  peak memory {result.peak_megabytes:.0f} MB"


def format_summary(results: list[CaseResult]) -> Iterator[str]:
    """A line a case, when there are several."""
    for result in results:
        figures = _figures(result)
        rates = ", ".join(
            f"{_TITLES[v.name]} {figures[v.name].value:.1f} images/s"
            + (f" ({share.value:.0%} of the session alone)" if (share := figures.get(f"{v.name}_share")) else "")
            for v in result.variants
        )
        yield f"{result.case.line()}: {rates}, peak {result.peak_megabytes:.0f} MB"


def _figures(result: CaseResult) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    if result.bare:
        figures["bare"] = _of(result.bare, lambda one: one.rate, "images/s", "higher")
    for variant in result.variants:
        figures[variant.name] = _of(variant.passes, lambda one: one.rate, "images/s", "higher")
    for variant in result.variants:
        if result.bare:
            # of neighbours in time, so that what slows both cancels
            shares = (one.rate / bare.rate for one, bare in zip(variant.passes, result.bare, strict=True))
            figures[f"{variant.name}_share"] = Figure.of_repeats(shares, "ratio", "higher")
    if result.plain:
        figures["plain"] = _of(result.plain, lambda one: one.rate, "images/s", "higher")
        for variant in result.variants:
            times = (one.rate / plain.rate for one, plain in zip(variant.passes, result.plain, strict=True))
            figures[f"{variant.name}_over_plain"] = Figure.of_repeats(times, "ratio", "higher")
    figures["peak_memory"] = Figure(result.peak_megabytes, "MB", "lower")
    if result.bare:
        figures["bare.cpu"] = _of(result.bare, _cpu_ms, "ms/image", "lower")
    for variant in result.variants:
        figures[f"{variant.name}.cpu"] = _of(variant.passes, _cpu_ms, "ms/image", "lower")
        for stage in _stages(variant):
            # waiting for a core or the interpreter's lock is in the wall time: no figure to compare machines' runs by
            directions: tuple[tuple[str, Better | None], ...] = (("wall", None), ("cpu", "lower"))
            for kind, better in directions:
                values = [_stage_ms(one, stage, kind) for one in variant.passes]
                figures[f"{variant.name}.{stage}.{kind}"] = Figure.of_repeats(values, "ms/image", better)
    return figures


def _of(passes: tuple[Pass, ...], value: Callable[[Pass], float], unit: str, better: Better) -> Figure:
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
        "bound": {variant.name: variant.bound.to_dict() for variant in result.variants},
        "memory": {variant.name: variant.memory.to_dict() for variant in result.variants},
        "last_pass": {variant.name: variant.passes[-1].times.to_dict() for variant in result.variants},
    }


def _rate(name: str, figure: Figure) -> str:
    spread = f", spread {figure.spread:.0%} over {len(figure.repeats)}" if figure.spread is not None else ""
    return f"{name}: {figure.value:.1f} images/s ({'once' if not spread else spread[2:]}{_noisy(figure)})"


def _noisy(figure: Figure) -> str:
    return ", NOISY" if figure.is_noisy else ""


def _stage_line(variant: Variant, kind: str, what: str) -> str:
    parts = [
        f"{stage} {statistics.median(_stage_ms(one, stage, kind) for one in variant.passes):.2f}"
        for stage in _stages(variant)
    ]
    return f"{what}: {', '.join(parts)}"
