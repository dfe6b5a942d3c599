"""The charts of each kind of measurement; measurements that lack what a chart needs are left to the table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from opal_deploy.bench.measurement import LINEAR, OPAL, Figure, Kind, Measurement
from opal_deploy.bench.report.content import label_measurements
from opal_deploy.bench.report.drawing import GRID, INK, Chart, Scale, start_chart
from opal_deploy.bench.tables import format_number, format_value, humanize, is_number

# a device's FLOPs a second and bytes a second
Roof = tuple[float, float]

# largest over smallest, beyond which an axis is logarithmic
_LOGARITHMIC = 12.0
_PERCENTILE = re.compile(r"p(\d{2}(?:\.\d+)?)(?:_ms)?$")
_SHARES = {
    "params_percent": "Parameters of the head",
    "macs_paper_percent": "Operations of the head, in the paper's convention",
}


@dataclass(frozen=True)
class ChartRow:
    """A named row: points (value, series), or bars one after the other, a series each; `value` stands at the right."""

    label: str
    value: str
    points: Sequence[tuple[float, int]] = ()
    interval: tuple[float, float] | None = None
    bars: Sequence[float] = ()


def draw_charts(kind: Kind, measurements: Sequence[Measurement]) -> list[Chart]:
    """Return every chart that these measurements of one kind have what it takes for."""
    return [chart for draw in _CHARTS.get(kind, ()) for chart in draw(measurements)]


def _draw_ratios(measurements: Sequence[Measurement]) -> Iterator[Chart]:
    """Draw the first ratio of every measurement with its 95 % interval, as a forest plot."""
    rows = []
    for label, m in _label([m for m in measurements if _find_figure(m, "ratio")]):
        if figure := _find_figure(m, "ratio"):
            rows.append(ChartRow(label, format_number(figure.value), [(figure.value, 0)], figure.interval))
    note = "Points are medians, lines their 95 % intervals; 1 is equal."
    yield from _draw_rows("Ratio to the reference", note, "throughput over the reference's", rows, center=1.0)


def _draw_throughput(measurements: Sequence[Measurement]) -> Iterator[Chart]:
    """Draw images a second over the batch for everything that was measured at several batches."""
    curves: dict[str, dict[int, Figure]] = defaultdict(dict)
    for label, m in _label([m for m in measurements if _get_batch(m) and _find_figure(m, "images/s")], ("batch",)):
        if figure := _find_figure(m, "images/s"):
            curves[label][_get_batch(m)] = figure
    if all(len(figures) < 2 for figures in curves.values()):
        return
    batches = sorted({batch for figures in curves.values() for batch in figures})
    ends = [end for figures in curves.values() for figure in figures.values() for end in _get_reach(figure)]
    chart = start_chart(
        "Throughput against batch",
        "Upright lines: from the slowest to the fastest repeat, or the interval.",
        ("batch", Scale(batches[0], batches[-1], logarithmic=True)),
        ("images/s", Scale.from_zero(ends)),
        ticks=batches[:: 1 + len(batches) // 9],
    )
    for series, (label, figures) in enumerate(curves.items()):
        chart.add_key(series, label)
        chart.line([(batch, figure.value) for batch, figure in sorted(figures.items())], series)
        for batch, figure in figures.items():
            chart.line([(batch, end) for end in _get_reach(figure)], series)
            chart.mark(batch, figure.value, series)
    yield chart


def _draw_percentiles(measurements: Sequence[Measurement]) -> Iterator[Chart]:
    """Draw the percentiles of the latency: a row for each measurement, a point for each percentile."""
    labelled = _label([m for m in measurements if _get_percentiles(m)])
    names = list(dict.fromkeys(name for _, m in labelled for name in _get_percentiles(m)))
    rows = []
    for label, m in labelled:
        values = _get_percentiles(m)
        points = [(value, names.index(name)) for name, value in values.items()]
        first = format_number(values[names[0]]) if names[0] in values else ""
        rows.append(ChartRow(label, first, points, (min(values.values()), max(values.values()))))
    note = f"The figure at the right is {names[0]}." if names else ""
    yield from _draw_rows("Latency percentiles", note, "milliseconds a batch", rows, names)


def _draw_stages(measurements: Sequence[Measurement]) -> Iterator[Chart]:
    """Draw stacked bars of wall time per image, from figures named `variant.stage.wall`."""
    stages: dict[str, dict[str, float]] = defaultdict(dict)
    for label, m in _label(measurements):
        for name, figure in m.figures.items():
            if figure.unit == "ms/image" and name.endswith(".wall") and name.count(".") == 2:
                variant, stage, _ = name.split(".")
                stages[_join(label, humanize(variant))][stage] = max(0.0, figure.value)
    names = list(dict.fromkeys(name for times in stages.values() for name in times))
    rows = [
        ChartRow(label, format_number(sum(times.values())), bars=[times.get(name, 0.0) for name in names])
        for label, times in stages.items()
    ]
    yield from _draw_rows("Time by stage", "", "milliseconds an image, all threads", rows, list(map(humanize, names)))


def _draw_memory(measurements: Sequence[Measurement]) -> Iterator[Chart]:
    """Draw resident memory over the time of a run, from curves in the details."""
    curves = {}
    for label, m in _label(measurements):
        memory = m.details.get("memory")
        for variant, curve in memory.items() if isinstance(memory, Mapping) else ():
            seconds, megabytes = (_get_numbers(curve, name) for name in ("seconds", "megabytes"))
            if len(seconds) == len(megabytes) > 1:
                curves[_join(label, humanize(variant))] = list(zip(seconds, megabytes, strict=True))
    if curves:
        x, y = (Scale.from_zero(point[axis] for curve in curves.values() for point in curve) for axis in (0, 1))
        chart = start_chart("Memory over time", "", ("seconds", x), ("MB", y))
        for series, (label, curve) in enumerate(curves.items()):
            chart.add_key(series, label, "line")
            chart.line(curve, series)
        yield chart


def _draw_overhead(measurements: Sequence[Measurement]) -> Iterator[Chart]:
    """Draw what each head adds, in % of its backbone: a point for each number of classes."""
    note = "A point for each number of classes; the figure is that of the largest."
    for suffix, title in _SHARES.items():
        shares: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for m in measurements:
            for series, head in enumerate((LINEAR, OPAL)):
                if figure := m.figures.get(f"{head}_{suffix}"):
                    shares[_get_backbone(m)].append((figure.value, series))
        rows = [ChartRow(name, f"{max(points)[0]:.3g} %", points) for name, points in shares.items()]
        yield from _draw_rows(title, note, "% of the backbone", rows, ("linear head", "opal head"))


def _draw_roofline(measurements: Sequence[Measurement]) -> Iterator[Chart]:
    """Draw a chart for each precision and batch: what each device allows at the intensity of each network."""
    groups: dict[str, list[Measurement]] = defaultdict(list)
    for m in measurements:
        precision = format_value(m.target.precision) if m.target else ""
        groups[_join(precision, f"batch {_get_batch(m)}" if _get_batch(m) else "")].append(m)
    for name, members in groups.items():
        networks, roofs = _get_intensities(members), _get_roofs(members)
        if not networks or not roofs:
            continue
        ridges = [flops / bandwidth for flops, bandwidth in roofs]
        values = [*ridges, *(at for parts in networks.values() for at in parts.values())]
        low, high = min(values) / 2.5, max(values) * 2.5
        floor = min(_attain(low, [roof]) for roof in roofs) / 1.5
        unit = "TOP/s" if name.startswith("int8") else "TFLOP/s"
        chart = start_chart(
            f"Roofline, {name}" if len(groups) > 1 else "Roofline",
            "Lines: the most that a device allows. Points: the intensity of each backbone, and of its head (hollow).",
            ("arithmetic intensity, FLOPs per byte", Scale(low, high, logarithmic=True)),
            (f"{unit} at most", Scale(floor, _attain(high, roofs) * 1.6, logarithmic=True)),
        )
        for series, (roof, label) in enumerate(roofs.items()):
            chart.add_key(series, label, "line")
            chart.line([(at, _attain(at, [roof])) for at in (low, ridges[series], high)], series)
        for series, (network, parts) in enumerate(networks.items(), len(roofs)):
            chart.add_key(series, network, "marker")
            for part, at in parts.items():
                chart.line([(at, floor), (at, _attain(at, roofs))], GRID)
                chart.mark(at, _attain(at, roofs), series, hollow=part == "head")
        yield chart


def _draw_rows(
    title: str, note: str, unit: str, rows: Sequence[ChartRow], names: Sequence[str] = (), center: float = 0.0
) -> Iterator[Chart]:
    """Draw rows, if any, over an axis around the center, else from zero or, where points lie far apart, logarithmic."""
    values = [value for row in rows for value in (*(v for v, _ in row.points), *(row.interval or ()))]
    scale = Scale.from_zero([*values, *(sum(row.bars) for row in rows)])
    if center and values:
        margin = 0.06 * (max(*values, center) - min(*values, center) or 0.1)
        scale = Scale(min(*values, center) - margin, max(*values, center) + margin)
    elif values and min(values) > 0 and max(values) / min(values) > _LOGARITHMIC:
        scale, unit = Scale(min(values) / 1.1, max(values) * 1.1, logarithmic=True), f"{unit} (logarithmic)"
    chart = start_chart(title, note, (unit, scale), rows=[(row.label, row.value) for row in rows])
    for series, name in enumerate(names):
        chart.add_key(series, name, "bar" if rows and rows[0].bars else "marker")
    if center:
        chart.line([(center, -0.6), (center, len(rows) - 0.7)], INK, 1)
    for y, row in enumerate(rows):
        for series, (start, end) in enumerate(pairwise([0.0, *accumulate(row.bars)])):
            chart.line([(start, y), (end, y)], series, 16)
        if row.interval:
            chart.line([(end, y) for end in row.interval], INK)
        # the first is drawn last: where points coincide, it is seen
        for value, series in reversed(row.points):
            chart.mark(value, y, series)
    if rows:
        yield chart


_CHARTS: dict[Kind, tuple[Callable[[Sequence[Measurement]], Iterator[Chart]], ...]] = {
    "compare": (_draw_ratios,),
    "throughput": (_draw_throughput,),
    "latency": (_draw_percentiles, _draw_throughput),
    "pipeline": (_draw_stages, _draw_memory),
    "overhead": (_draw_overhead,),
    "roofline": (_draw_roofline,),
}


def _label(measurements: Sequence[Measurement], without: Sequence[str] = ()) -> list[tuple[str, Measurement]]:
    return list(zip(label_measurements(measurements, without), measurements, strict=True))


def _join(*texts: str) -> str:
    return ", ".join(text for text in texts if text)


def _find_figure(measurement: Measurement, unit: str) -> Figure | None:
    return next((figure for figure in measurement.figures.values() if figure.unit == unit), None)


def _get_batch(measurement: Measurement) -> int:
    """Return the batch; 0 where none is recorded."""
    batch = measurement.case.get("batch")
    return max(0, batch) if isinstance(batch, int) and not isinstance(batch, bool) else 0


def _get_backbone(measurement: Measurement) -> str:
    target = measurement.target
    return format_value((target.backbone or target.name) if target else "")


def _get_percentiles(measurement: Measurement) -> dict[str, float]:
    matches = ((_PERCENTILE.match(name), figure) for name, figure in measurement.figures.items() if figure.unit == "ms")
    percentiles = {f"p{match[1]}": figure.value for match, figure in matches if match}
    return dict(sorted(percentiles.items(), key=lambda item: float(item[0][1:])))


def _get_reach(figure: Figure) -> tuple[float, float]:
    """Return the interval, else the smallest and the largest repeat."""
    repeats = figure.repeats or (figure.value,)
    return figure.interval or (min(repeats), max(repeats))


def _get_numbers(curve: Any, name: str) -> list[float]:
    values = curve.get(name) if isinstance(curve, Mapping) else None
    return values if isinstance(values, list) and all(map(is_number, values)) else []


def _get_intensities(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Return FLOPs per byte by network and part; a whole network is hardly more than its backbone."""
    networks: dict[str, dict[str, float]] = defaultdict(dict)
    for m in measurements:
        figure, part = _find_figure(m, "FLOPs/byte"), m.case.get("part") or "network"
        if figure and figure.value > 0:
            networks[_get_backbone(m)][format_value(part)] = figure.value
    for parts in networks.values():
        if len(parts) > 1:
            parts.pop("network", None)
    return networks


def _get_roofs(measurements: Sequence[Measurement]) -> dict[Roof, str]:
    """Return the ceilings in the details of all measurements, with the names of all devices that have the same."""
    names: dict[Roof, list[str]] = defaultdict(list)
    for m in measurements:
        ceilings = m.details.get("ceilings")
        for ceiling in ceilings if isinstance(ceilings, list) else []:
            facts = ceiling if isinstance(ceiling, Mapping) else {}
            flops, bandwidth = facts.get("flops"), facts.get("bytes_per_second")
            if is_number(flops) and is_number(bandwidth) and min(flops, bandwidth) > 0:
                names[flops, bandwidth].append(format_value(facts.get("name", "device")))
    return {roof: ", ".join(dict.fromkeys(devices)) for roof, devices in names.items()}


def _attain(intensity: float, roofs: Iterable[Roof]) -> float:
    """Return the most of several roofs at an intensity in FLOPs per byte, in TFLOP/s."""
    return max(min(flops, intensity * bandwidth) for flops, bandwidth in roofs) / 1e12
