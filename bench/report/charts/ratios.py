"""Ratios with their intervals, as a forest plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opal_deploy.bench.report.charts.series import figure_in
from opal_deploy.bench.report.drawing import INK, Plot, color, name_rows, plot, rows_height
from opal_deploy.bench.report.tables import Row, labels, precision_note
from opal_deploy.bench.tables import format_number, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def ratios(rows: Sequence[Row]) -> list[Plot]:
    """One plot of the first ratio of every row: the point is the median, the line its 95 % interval."""
    found = [(row, figure) for row in rows if (figure := figure_in(row.measurement, "ratio"))]
    if not found:
        return []
    names = labels([row for row, _ in found])
    figures = [figure for _, (_, figure) in found]
    texts = [f"{format_number(f.value)} {precision_note(f) if f.interval else ''}".strip() for f in figures]

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        axes.axvline(1.0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        for place, (figure, text) in enumerate(zip(figures, texts, strict=True)):
            if figure.interval:
                axes.hlines(place, *figure.interval, colors=color(0), linewidth=2.5)
                axes.vlines(figure.interval, place - 0.13, place + 0.13, colors=color(0), linewidth=2.5)
            axes.plot(figure.value, place, marker="D", color=color(0), markersize=7.5)
            if not narrow:
                axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=11)
        told = [f"{shorten(name, 24)}  {text}" for name, text in zip(names, texts, strict=True)]
        name_rows(axes, told if narrow else names, narrow)
        ends = [end for f in figures for end in (*(f.interval or ()), f.value, 1.0)]
        room = (max(ends) - min(ends)) or 0.1
        axes.set_xlim(min(ends) - 0.06 * room, max(ends) + 0.06 * room)
        axes.set_xlabel("throughput over the reference's; 1 is equal")

    told = "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))
    return [plot("Ratio to the reference", f"Median and 95 % interval: {told}.", paint, rows_height(len(found), 34.0))]
