"""The charts of each kind of measurement; rows that lack what a chart needs are left to the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from opal_deploy.bench.measurement import Figure, Kind, Measurement
from opal_deploy.bench.report.axes import (
    AXIS_HEIGHT,
    PLOT_HEIGHT,
    ROW_HEIGHT,
    ROW_MIDDLE,
    Axis,
    draw_axes,
    draw_rows,
    join_labels,
    label_ticks,
    span_zero,
    split_series,
)
from opal_deploy.bench.report.drawing import Bar, Chart, Key, Line, Marker, bar_opacity, connect, series_color
from opal_deploy.bench.report.roofline_chart import draw_roofline
from opal_deploy.bench.report.rows import Row, find_figure, get_backbone, get_batch, label_rows
from opal_deploy.bench.tables import format_number, humanize, is_number

_MAX_SERIES, _MAX_ROWS = 9, 24
# lines without markers: as many as there are colours
_MAX_LINES = 7
# largest over smallest: beyond this, small values would lie on top of each other on a linear axis
_LOGARITHMIC = 12.0
_PERCENTILE = re.compile(r"p(\d{2}(?:\.\d+)?)(?:_ms)?$")
_SHARE = re.compile(r"(?P<head>[a-z0-9]+)_(?P<quantity>.+?)(?:_percent)?$")
_SHARE_TITLES = {
    "params": "Parameters of the head",
    "macs_paper": "Operations of the head, in the paper's convention",
}


def draw_charts(kind: Kind, rows: Sequence[Row]) -> list[Chart]:
    """Return every chart that these measurements of one kind have what it takes for."""
    return [chart for draw in _CHARTS[kind] for chart in draw(rows)]


def draw_ratios(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw the first ratio of every row with its 95 % interval, as a forest plot."""
    pairs = [(row, figure) for row in rows if (figure := find_figure(row.measurement, "ratio"))]
    for part, group in split_series(pairs, _MAX_ROWS):
        labels = label_rows([row for row, _ in group])
        figures = [figure for _, figure in group]
        ends = [end for figure in figures for end in (*(figure.interval or ()), figure.value, 1.0)]
        margin = 0.06 * (max(ends) - min(ends) or 0.1)
        x = Axis(min(ends) - margin, max(ends) + margin, 0.015, 0.985)
        elements = draw_rows(x, labels, [format_number(f.value) for f in figures], "throughput over the reference's")
        elements.append(Line((x(1.0), ROW_MIDDLE - 12), (x(1.0), len(group) * ROW_HEIGHT), "ink", 1.2, (4, 3)))
        for index, figure in enumerate(figures):
            y = index * ROW_HEIGHT + ROW_MIDDLE
            if figure.interval:
                low, high = map(x, figure.interval)
                pieces = (((low, y), (high, y)), ((low, y - 5), (low, y + 5)), ((high, y - 5), (high, y + 5)))
                elements += [Line(start, end, series_color(0), 2.5) for start, end in pieces]
            elements.append(Marker((x(figure.value), y), 0))
        yield Chart(
            f"Ratio to the reference{part}",
            f"Median and 95 % interval of {len(group)} comparisons; the table has the numbers.",
            tuple(elements),
            len(group) * ROW_HEIGHT + AXIS_HEIGHT,
            note="Points are medians, lines their 95 % intervals; 1 is equal.",
        )


def draw_throughput(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw images a second over the batch for everything that was measured at several batches."""
    series: dict[str, list[tuple[int, Figure]]] = {}
    measured = [row for row in rows if get_batch(row.measurement) and find_figure(row.measurement, "images/s")]
    for row, label in zip(measured, label_rows(measured, ("batch",)), strict=True):
        batch, figure = get_batch(row.measurement), find_figure(row.measurement, "images/s")
        if batch and figure:
            series.setdefault(label, []).append((batch, figure))
    if all(len({batch for batch, _ in points}) < 2 for points in series.values()):
        return
    for part, group in split_series(list(series.items()), _MAX_SERIES):
        batches = sorted({batch for _, points in group for batch, _ in points})
        reaches = [end for _, points in group for _, figure in points for end in _get_reach(figure)]
        x = Axis(batches[0], max(batches[-1], batches[0] + 1), 0.1, 0.97, logarithmic=True)
        y = span_zero(reaches, PLOT_HEIGHT, 16)
        shown = batches[:: 1 + len(batches) // 9]
        elements = draw_axes(x, y, [(batch, str(batch)) for batch in shown], "batch", "images/s")
        for index, (_, points) in enumerate(group):
            points = sorted(points, key=lambda point: point[0])
            places = [(x(batch), y(figure.value)) for batch, figure in points]
            elements += connect(places, index)
            for (across, down), (_, figure) in zip(places, points, strict=True):
                low, high = map(y, _get_reach(figure))
                elements += [*connect([(across, low), (across, high)], index), Marker((across, down), index)]
        yield Chart(
            f"Throughput against batch{part}",
            f"Lines over batches {batches[0]} to {batches[-1]} for {', '.join(label for label, _ in group)}.",
            tuple(elements),
            PLOT_HEIGHT + AXIS_HEIGHT,
            tuple(Key(label, index) for index, (label, _) in enumerate(group)),
            "Upright lines: from the slowest to the fastest repeat, or the interval.",
        )


def draw_percentiles(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw the percentiles of the latency: a row each, a point a percentile."""
    yield from _draw_points("Latency percentiles", rows, _get_percentiles, "milliseconds a batch")


def draw_rates(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw everything in images a second, a row each: the whole pipeline beside the bare session."""
    yield from _draw_points("Throughput of the whole pipeline", rows, _get_rates, "images/s")


def draw_stages(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw stacked bars of wall time per image, from figures named `variant.stage.wall`."""
    bars: list[tuple[str, dict[str, float]]] = []
    for row, label in zip(rows, label_rows(rows), strict=True):
        variants: dict[str, dict[str, float]] = {}
        for name, figure in row.measurement.figures.items():
            if figure.unit == "ms/image" and name.endswith(".wall") and name.count(".") == 2:
                variant, stage, _ = name.split(".")
                variants.setdefault(variant, {})[stage] = figure.value
        bars += [(join_labels(label, humanize(variant)), stages) for variant, stages in variants.items()]
    for part, group in split_series(bars, _MAX_ROWS):
        names = list(dict.fromkeys(stage for _, stages in group for stage in stages))
        totals = [sum(stages.values()) for _, stages in group]
        x = span_zero(totals, 0.015, 0.985)
        labels = [label for label, _ in group]
        elements = draw_rows(x, labels, list(map(format_number, totals)), "milliseconds an image, all threads")
        for index, (_, stages) in enumerate(group):
            y, start = index * ROW_HEIGHT + ROW_MIDDLE, 0.0
            for series, name in enumerate(names):
                end = start + stages.get(name, 0.0)
                if end > start:
                    elements.append(Bar((x(start), y - 8), (x(end), y + 8), series_color(series), bar_opacity(series)))
                start = end
        yield Chart(
            f"Time by stage{part}",
            f"Stacked bars of {', '.join(map(humanize, names))}; the table has the numbers.",
            tuple(elements),
            len(group) * ROW_HEIGHT + AXIS_HEIGHT,
            tuple(Key(humanize(name), series, "bar") for series, name in enumerate(names)),
        )


def draw_memory(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw resident memory over the time of a run, from curves in the details."""
    curves = [
        (join_labels(label, humanize(variant)), seconds, megabytes)
        for row, label in zip(rows, label_rows(rows), strict=True)
        for variant, seconds, megabytes in _find_curves(row.measurement.details)
    ]
    for part, group in split_series(curves, _MAX_LINES):
        x = span_zero([second for _, seconds, _ in group for second in seconds], 0.1, 0.97)
        y = span_zero([megabyte for _, _, megabytes in group for megabyte in megabytes], PLOT_HEIGHT, 16)
        elements = draw_axes(x, y, label_ticks(x.ticks(6)), "seconds", "MB")
        for index, (_, seconds, megabytes) in enumerate(group):
            places = [(x(second), y(megabyte)) for second, megabyte in zip(seconds, megabytes, strict=True)]
            elements += connect(places, index)
        ends = (f"{name}: {format_number(mb[0])} MB at first, {format_number(mb[-1])} at last" for name, _, mb in group)
        yield Chart(
            f"Memory over time{part}",
            f"{'; '.join(ends)}.",
            tuple(elements),
            PLOT_HEIGHT + AXIS_HEIGHT,
            tuple(Key(name, index, "line") for index, (name, _, _) in enumerate(group)),
        )


def draw_server(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw the latency over the rate of arrivals, from the trials in the details."""
    tried = [
        (row, label, trials)
        for row, label in zip(rows, label_rows(rows), strict=True)
        if (trials := _get_trials(row.measurement))
    ]
    for part, group in split_series(tried, _MAX_SERIES):
        cases = (row.measurement.case.get("limit_ms") for row, _, _ in group)
        limits = sorted({float(limit) for limit in cases if is_number(limit)})
        x = span_zero([rate for _, _, trials in group for rate, _, _ in trials], 0.1, 0.97)
        latencies = [latency for _, _, trials in group for _, latency, _ in trials]
        y = span_zero([*limits, *latencies], PLOT_HEIGHT, 16)
        elements = draw_axes(x, y, label_ticks(x.ticks(6)), "arrivals a second", "ms, p99")
        elements += [Line((0, y(limit)), (1, y(limit)), "ink", 1.2, (4, 3)) for limit in limits]
        for index, (_, _, trials) in enumerate(group):
            places = [(x(rate), y(latency)) for rate, latency, _ in trials]
            elements += connect(places, index, 1.2)
            elements += [
                Marker(place, index, hollow=not held) for place, (_, _, held) in zip(places, trials, strict=True)
            ]
        yield Chart(
            f"Latency against the rate of arrivals{part}",
            f"Trials of {', '.join(label for _, label, _ in group)}; the details have the numbers.",
            tuple(elements),
            PLOT_HEIGHT + AXIS_HEIGHT,
            tuple(Key(label, index) for index, (_, label, _) in enumerate(group)),
            "Filled points kept the limit (dashed), hollow ones did not.",
        )


def draw_overhead(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw what each head adds, in % of its backbone: bars, and a point for each number of classes."""
    # quantity -> backbone -> head -> shares, one for each number of classes
    shares: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        for name, figure in row.measurement.figures.items():
            match = _SHARE.match(name) if figure.unit == "%" else None
            if match and match["quantity"] in _SHARE_TITLES:
                backbones = shares.setdefault(match["quantity"], {})
                heads = backbones.setdefault(get_backbone(row.measurement), {})
                heads.setdefault(match["head"], []).append(figure.value)
    for quantity, backbones in shares.items():
        names = list(dict.fromkeys(head for heads in backbones.values() for head in heads))
        largest = [max(map(max, heads.values())) for heads in backbones.values()]
        x = span_zero(largest, 0.015, 0.985)
        values = [f"{format_number(float(f'{value:.3g}'))} %" for value in largest]
        elements = draw_rows(x, list(backbones), values, "% of the backbone")
        for index, heads in enumerate(backbones.values()):
            for head, points in heads.items():
                series = names.index(head)
                y = index * ROW_HEIGHT + ROW_MIDDLE + (series - (len(names) - 1) / 2) * 18 / len(names)
                thickness = 7 / len(names)
                color = series_color(series)
                elements.append(Bar((x(0), y - thickness), (x(max(points)), y + thickness), color, 0.4))
                elements += [Marker((x(value), y), series) for value in points]
        yield Chart(
            _SHARE_TITLES[quantity],
            f"Bars in % of the backbone for {', '.join(backbones)}; the table has the numbers.",
            tuple(elements),
            len(backbones) * ROW_HEIGHT + AXIS_HEIGHT,
            tuple(Key(f"{head} head", series) for series, head in enumerate(names)),
            "A point for each number of classes; the figure is that of the largest.",
        )


_CHARTS: dict[Kind, tuple[Callable[[Sequence[Row]], Iterator[Chart]], ...]] = {
    "compare": (draw_ratios,),
    "throughput": (draw_throughput,),
    "latency": (draw_percentiles, draw_throughput),
    "server": (draw_server,),
    "pipeline": (draw_rates, draw_stages, draw_memory),
    "overhead": (draw_overhead,),
    "roofline": (draw_roofline,),
    "ceiling": (),
}


def _draw_points(
    title: str, rows: Sequence[Row], get_values: Callable[[Measurement], dict[str, float]], unit: str
) -> Iterator[Chart]:
    """Draw rows of points on a common axis: several figures of one unit for each row."""
    for part, group in split_series([row for row in rows if get_values(row.measurement)], _MAX_ROWS):
        rows_values = [get_values(row.measurement) for row in group]
        names = list(dict.fromkeys(name for values in rows_values for name in values))
        every = [value for values in rows_values for value in values.values()]
        logarithmic = min(every) > 0 and max(every) / min(every) > _LOGARITHMIC
        x = span_zero(every, 0.015, 0.985)
        if logarithmic:
            x = Axis(min(every) / 1.1, max(every) * 1.1, 0.015, 0.985, logarithmic=True)
        firsts = [format_number(values[names[0]]) if names[0] in values else "" for values in rows_values]
        elements = draw_rows(x, label_rows(group), firsts, f"{unit} (logarithmic)" if logarithmic else unit)
        for index, values in enumerate(rows_values):
            y = index * ROW_HEIGHT + ROW_MIDDLE
            elements.append(Line((x(min(values.values())), y), (x(max(values.values())), y), "ink"))
            # the first is drawn last: where points coincide, it is seen
            elements += [Marker((x(value), y), names.index(name)) for name, value in reversed(values.items())]
        yield Chart(
            f"{title}{part}",
            f"In {unit}, a row each for {len(group)} measurements; the table has the numbers.",
            tuple(elements),
            len(group) * ROW_HEIGHT + AXIS_HEIGHT,
            tuple(Key(name, series) for series, name in enumerate(names)),
            f"The figure at the right is {names[0]}.",
        )


def _get_reach(figure: Figure) -> tuple[float, float]:
    """Return the interval, else the smallest and the largest repeat."""
    repeats = figure.repeats or (figure.value,)
    return figure.interval or (min(repeats), max(repeats))


def _get_percentiles(measurement: Measurement) -> dict[str, float]:
    matches = ((_PERCENTILE.match(name), figure) for name, figure in measurement.figures.items() if figure.unit == "ms")
    percentiles = {f"p{match[1]}": figure.value for match, figure in matches if match}
    return dict(sorted(percentiles.items(), key=lambda item: float(item[0][1:])))


def _get_rates(measurement: Measurement) -> dict[str, float]:
    return {humanize(name): f.value for name, f in measurement.figures.items() if f.unit == "images/s"}


def _find_curves(details: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield every {"seconds": [...], "megabytes": [...]}, wherever it lies in the details."""
    seconds, megabytes = details.get("seconds"), details.get("megabytes")
    if isinstance(seconds, list) and isinstance(megabytes, list):
        if len(seconds) == len(megabytes) > 1 and all(map(is_number, [*seconds, *megabytes])):
            yield name, seconds, megabytes
        return
    for key, value in details.items():
        if isinstance(value, Mapping):
            yield from _find_curves(value, str(key))


def _get_trials(measurement: Measurement) -> list[tuple[float, float, bool]]:
    """Return rate, p99 in ms, and whether it kept the limit, of each trial."""
    tried = measurement.details.get("tried")
    trials = []
    for trial in tried if isinstance(tried, list) else []:
        if isinstance(trial, Mapping):
            rate = next((trial[name] for name in ("queries_per_second", "rate") if is_number(trial.get(name))), None)
            if rate is not None and is_number(trial.get("p99_ms")):
                trials.append((float(rate), float(trial["p99_ms"]), bool(trial.get("held"))))
    return sorted(trials)
