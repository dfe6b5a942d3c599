"""The charts of each kind of measurement; rows that lack what a chart needs are left to the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from opal_deploy.bench.measurement import LINEAR, OPAL, Figure, Kind, Measurement
from opal_deploy.bench.report.drawing import Chart, Key
from opal_deploy.bench.report.plots import ChartRow, Curve, CurvePoint, Scale, draw_curves, draw_rows
from opal_deploy.bench.report.rows import Row, find_figure, label_rows
from opal_deploy.bench.tables import format_number, format_value, humanize, is_number

# a device's FLOPs a second and bytes a second
Roof = tuple[float, float]

_PERCENTILE = re.compile(r"p(\d{2}(?:\.\d+)?)(?:_ms)?$")
_SHARE_TITLES = {
    "params_percent": "Parameters of the head",
    "macs_paper_percent": "Operations of the head, in the paper's convention",
}


def draw_charts(kind: Kind, rows: Sequence[Row]) -> list[Chart]:
    """Return every chart that these measurements of one kind have what it takes for."""
    return [chart for draw in _CHARTS.get(kind, ()) for chart in draw(rows)]


def draw_ratios(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw the first ratio of every row with its 95 % interval, as a forest plot."""
    measured = [row for row in rows if find_figure(row.measurement, "ratio")]
    chart_rows = []
    for row, label in zip(measured, label_rows(measured), strict=True):
        if figure := find_figure(row.measurement, "ratio"):
            chart_rows.append(ChartRow(label, format_number(figure.value), [(figure.value, 0)], figure.interval))
    note = "Points are medians, lines their 95 % intervals; 1 is equal."
    yield from draw_rows("Ratio to the reference", chart_rows, "throughput over the reference's", note=note, center=1.0)


def draw_throughput(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw images a second over the batch for everything that was measured at several batches."""
    series: dict[str, dict[int, Figure]] = {}
    measured = [row for row in rows if _get_batch(row.measurement) and find_figure(row.measurement, "images/s")]
    for row, label in zip(measured, label_rows(measured, ("batch",)), strict=True):
        batch, figure = _get_batch(row.measurement), find_figure(row.measurement, "images/s")
        if batch and figure:
            series.setdefault(label, {})[batch] = figure
    if all(len(figures) < 2 for figures in series.values()):
        return
    curves = [
        Curve(label, [CurvePoint(batch, figure.value, _get_reach(figure)) for batch, figure in sorted(figures.items())])
        for label, figures in series.items()
    ]
    batches = sorted({batch for figures in series.values() for batch in figures})
    reaches = [end for figures in series.values() for figure in figures.values() for end in _get_reach(figure)]
    yield from draw_curves(
        "Throughput against batch",
        curves,
        (Scale(batches[0], batches[-1], logarithmic=True), Scale.from_zero(reaches)),
        ("batch", "images/s"),
        "Upright lines: from the slowest to the fastest repeat, or the interval.",
        batches[:: 1 + len(batches) // 9],
    )


def draw_percentiles(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw the percentiles of the latency: a row for each measurement, a point for each percentile."""
    measured = [row for row in rows if _get_percentiles(row.measurement)]
    tables = [_get_percentiles(row.measurement) for row in measured]
    names = list(dict.fromkeys(name for percentiles in tables for name in percentiles))
    chart_rows = [
        ChartRow(
            label,
            format_number(percentiles[names[0]]) if names[0] in percentiles else "",
            [(value, names.index(name)) for name, value in percentiles.items()],
            (min(percentiles.values()), max(percentiles.values())),
        )
        for label, percentiles in zip(label_rows(measured), tables, strict=True)
    ]
    legend = tuple(Key(name, series) for series, name in enumerate(names))
    note = f"The figure at the right is {names[0]}." if names else ""
    yield from draw_rows("Latency percentiles", chart_rows, "milliseconds a batch", legend, note)


def draw_stages(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw stacked bars of wall time per image, from figures named `variant.stage.wall`."""
    bars: dict[str, dict[str, float]] = {}
    for row, label in zip(rows, label_rows(rows), strict=True):
        for name, figure in row.measurement.figures.items():
            if figure.unit == "ms/image" and name.endswith(".wall") and name.count(".") == 2:
                variant, stage, _ = name.split(".")
                bars.setdefault(_join_labels(label, humanize(variant)), {})[stage] = max(0.0, figure.value)
    names = list(dict.fromkeys(stage for stages in bars.values() for stage in stages))
    chart_rows = [
        ChartRow(label, format_number(sum(stages.values())), bars=[stages.get(name, 0.0) for name in names])
        for label, stages in bars.items()
    ]
    legend = tuple(Key(humanize(name), series, "bar") for series, name in enumerate(names))
    yield from draw_rows("Time by stage", chart_rows, "milliseconds an image, all threads", legend)


def draw_memory(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw resident memory over the time of a run, from curves in the details."""
    curves = []
    for row, label in zip(rows, label_rows(rows), strict=True):
        memory = row.measurement.details.get("memory")
        for variant, curve in memory.items() if isinstance(memory, Mapping) else ():
            seconds, megabytes = (_get_numbers(curve, name) for name in ("seconds", "megabytes"))
            if len(seconds) == len(megabytes) > 1:
                points = list(map(CurvePoint, seconds, megabytes))
                curves.append(Curve(_join_labels(label, humanize(variant)), points, "line"))
    x = Scale.from_zero(point.x for curve in curves for point in curve.points)
    y = Scale.from_zero(point.y for curve in curves for point in curve.points)
    yield from draw_curves("Memory over time", curves, (x, y), ("seconds", "MB"))


def draw_overhead(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw what each head adds, in % of its backbone: a point for each number of classes."""
    for suffix, title in _SHARE_TITLES.items():
        points: dict[str, list[tuple[float, int]]] = {}
        for row in rows:
            for series, head in enumerate((LINEAR, OPAL)):
                if figure := row.measurement.figures.get(f"{head}_{suffix}"):
                    points.setdefault(_get_backbone(row.measurement), []).append((figure.value, series))
        chart_rows = [ChartRow(name, f"{max(shares)[0]:.3g} %", shares) for name, shares in points.items()]
        legend = (Key("linear head", 0), Key("opal head", 1))
        note = "A point for each number of classes; the figure is that of the largest."
        yield from draw_rows(title, chart_rows, "% of the backbone", legend, note)


def draw_roofline(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw a chart for each precision and batch: what each device allows at the intensity of each network."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        target, batch = row.measurement.target, _get_batch(row.measurement)
        name = _join_labels(format_value(target.precision) if target else "", f"batch {batch}" if batch else "")
        groups.setdefault(name, []).append(row)
    for name, members in groups.items():
        networks, roofs = _get_intensities(members), _get_roofs(members)
        if not networks or not roofs:
            continue
        ridges = [flops / bandwidth for flops, bandwidth in roofs]
        values = [*ridges, *(value for parts in networks.values() for value in parts.values())]
        low, high = min(values) / 2.5, max(values) * 2.5
        floor = min(_attain(low, [roof]) for roof in roofs) / 1.5
        curves = [
            Curve(label, [CurvePoint(at, _attain(at, [roof])) for at in (low, ridge, high)], "dashed")
            for (roof, label), ridge in zip(roofs.items(), ridges, strict=True)
        ]
        for network, parts in networks.items():
            tops = [(at, _attain(at, roofs), part) for part, at in parts.items()]
            points = [CurvePoint(at, top, (floor, top), hollow=part == "head") for at, top, part in tops]
            curves.append(Curve(network, points, "marker"))
        yield from draw_curves(
            f"Roofline, {name}" if len(groups) > 1 else "Roofline",
            curves,
            (Scale(low, high, logarithmic=True), Scale(floor, _attain(high, roofs) * 1.6, logarithmic=True)),
            ("arithmetic intensity, FLOPs per byte", f"{'TOP/s' if name.startswith('int8') else 'TFLOP/s'} at most"),
            "Lines: the most that a device allows. Points: the intensity of each backbone, and of its head (hollow).",
            limit=len(curves),
        )


_CHARTS: dict[Kind, tuple[Callable[[Sequence[Row]], Iterator[Chart]], ...]] = {
    "compare": (draw_ratios,),
    "throughput": (draw_throughput,),
    "latency": (draw_percentiles, draw_throughput),
    "pipeline": (draw_stages, draw_memory),
    "overhead": (draw_overhead,),
    "roofline": (draw_roofline,),
}


def _join_labels(*texts: str) -> str:
    return ", ".join(text for text in texts if text)


def _get_batch(measurement: Measurement) -> int | None:
    batch = measurement.case.get("batch")
    return batch if isinstance(batch, int) and not isinstance(batch, bool) and batch > 0 else None


def _get_backbone(measurement: Measurement) -> str:
    target = measurement.target
    return format_value((target.backbone or target.name) if target else "")


def _get_reach(figure: Figure) -> tuple[float, float]:
    """Return the interval, else the smallest and the largest repeat."""
    repeats = figure.repeats or (figure.value,)
    return figure.interval or (min(repeats), max(repeats))


def _get_percentiles(measurement: Measurement) -> dict[str, float]:
    matches = ((_PERCENTILE.match(name), figure) for name, figure in measurement.figures.items() if figure.unit == "ms")
    percentiles = {f"p{match[1]}": figure.value for match, figure in matches if match}
    return dict(sorted(percentiles.items(), key=lambda item: float(item[0][1:])))


def _get_numbers(curve: Any, name: str) -> list[float]:
    values = curve.get(name) if isinstance(curve, Mapping) else None
    return values if isinstance(values, list) and all(map(is_number, values)) else []


def _get_intensities(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return FLOPs per byte by network and part; a whole network is hardly more than its backbone."""
    networks: dict[str, dict[str, float]] = {}
    for row in rows:
        figure, part = find_figure(row.measurement, "FLOPs/byte"), row.measurement.case.get("part") or "network"
        if figure and figure.value > 0:
            networks.setdefault(_get_backbone(row.measurement), {})[format_value(part)] = figure.value
    for parts in networks.values():
        if len(parts) > 1:
            parts.pop("network", None)
    return networks


def _get_roofs(rows: Sequence[Row]) -> dict[Roof, str]:
    """Return the ceilings in the details of all rows, with the names of all devices that have the same."""
    names: dict[Roof, list[str]] = {}
    for row in rows:
        ceilings = row.measurement.details.get("ceilings")
        for ceiling in ceilings if isinstance(ceilings, list) else []:
            facts = ceiling if isinstance(ceiling, Mapping) else {}
            flops, bandwidth = facts.get("flops"), facts.get("bytes_per_second")
            if is_number(flops) and is_number(bandwidth) and min(flops, bandwidth) > 0:
                names.setdefault((flops, bandwidth), []).append(format_value(facts.get("name", "device")))
    return {roof: ", ".join(dict.fromkeys(devices)) for roof, devices in names.items()}


def _attain(intensity: float, roofs: Iterable[Roof]) -> float:
    """Return the most of several roofs at an intensity in FLOPs per byte, in TFLOP/s."""
    return max(min(flops, intensity * bandwidth) for flops, bandwidth in roofs) / 1e12
