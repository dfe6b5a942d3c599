"""Images a second against the batch; or as bars, where there is one batch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opal_deploy.bench.measurement import Figure
from opal_deploy.bench.report.charts.series import batch_of, by_label, facets, figure_in, titled
from opal_deploy.bench.report.drawing import Key, Plot, color, label_end, marker, name_rows, plot, rows_height
from opal_deploy.bench.report.tables import Row, labels
from opal_deploy.bench.tables import format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

UNIT = "images/s"


def throughput(rows: Sequence[Row]) -> list[Plot]:
    """A line for whatever was measured at several batches, if anything was; otherwise bars."""
    measured = [row for row in rows if figure_in(row.measurement, UNIT)]
    with_batch = [row for row in measured if batch_of(row.measurement)]
    out = []
    for facet, members in facets(with_batch, ("batch",)) if with_batch else []:
        series = list(by_label(members, ("batch",)).items())
        if any(len({batch_of(row.measurement) for row in group}) > 1 for _, group in series):
            out.append(_lines(series, facet))
        else:
            out.append(_bars(members, facet))
    return out or [_bars(group, facet) for facet, group in (facets(measured) if measured else [])]


def _rate(row: Row) -> Figure:
    found = figure_in(row.measurement, UNIT)
    return found[1] if found else Figure(0.0, UNIT)


def _lines(series: Sequence[tuple[str, list[Row]]], facet: str) -> Plot:
    batches = sorted({batch for _, group in series for row in group if (batch := batch_of(row.measurement))})

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        axes.set_xscale("log", base=2)
        for place, (_, group) in enumerate(series):
            points = sorted((batch_of(row.measurement) or 1, _rate(row).value, _reach(_rate(row))) for row in group)
            xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
            axes.plot(xs, ys, marker=marker(place), color=color(place))
            lows, highs = zip(*(reach for _, _, reach in points), strict=True)
            axes.vlines(xs, lows, highs, colors=color(place))
        shown = batches if len(batches) <= (7 if narrow else 12) else batches[:: 2 if not narrow else 3]
        axes.set_xticks(shown, [str(batch) for batch in shown])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch")
        axes.set_ylabel(UNIT)

    best = max(((_rate(row).value, label, batch_of(row.measurement)) for label, g in series for row in g), default=None)
    told = f" The highest: {format_number(best[0])} {UNIT}, {best[1]}, batch {best[2]}." if best else ""
    return plot(
        titled("Throughput against batch", facet),
        f"Lines over batches {batches[0]} to {batches[-1]} for {', '.join(label for label, _ in series)}.{told}",
        paint,
        lambda narrow: 300.0 if narrow else 380.0,
        [Key(label, place) for place, (label, _) in enumerate(series)],
    )


def _bars(rows: Sequence[Row], facet: str) -> Plot:
    names = labels(rows)
    figures = [_rate(row) for row in rows]

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        axes.barh(range(len(rows)), [f.value for f in figures], height=0.36 if narrow else 0.55, color=color(0))
        for place, figure in enumerate(figures):
            label_end(axes, figure.value, place, format_number(figure.value))
        name_rows(axes, names, narrow)
        axes.set_xlim(0, max(f.value for f in figures) * (1.2 if narrow else 1.1) or 1)
        axes.set_xlabel(UNIT)

    return plot(
        titled("Throughput", facet),
        "Bars: "
        + "; ".join(f"{name} {format_number(f.value)} {UNIT}" for name, f in zip(names, figures, strict=True))
        + ".",
        paint,
        rows_height(len(rows)),
    )


def _reach(figure: Figure) -> tuple[float, float]:
    """From the smallest to the largest repeat, or the interval."""
    if figure.interval is not None:
        return figure.interval
    return (min(figure.repeats), max(figure.repeats)) if figure.repeats else (figure.value, figure.value)
