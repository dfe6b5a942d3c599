"""Rows of points on a common axis: several figures of the same unit for each row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from opal_deploy.bench.report.drawing import CARD, INK, Key, Plot, color, marker, name_rows, plot, rows_height
from opal_deploy.bench.tables import format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MOST_ROWS = 24
# largest over smallest: beyond this, small values would lie on top of each other on a linear axis
_LOGARITHMIC = 12.0


def dots(
    title: str, names: Sequence[str], values: Sequence[Mapping[str, float]], series: Sequence[str], axis: str
) -> Plot:
    """One plot.

    Args:
        names: of the rows. values: of each row, by series; none may be empty.
        series: in the order of the legend. axis: what the values are, with their unit.
    """
    every = [value for each in values for value in each.values()]
    logarithmic = min(every) > 0 and max(every) / min(every) > _LOGARITHMIC

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        for place, each in enumerate(values):
            axes.hlines(place, min(each.values()), max(each.values()), colors=INK, linewidth=1.0, zorder=1)
        # what comes first is drawn last: where points coincide, the first is seen
        for index, kind in reversed(list(enumerate(series))):
            points = [(each[kind], place) for place, each in enumerate(values) if kind in each]
            axes.scatter(
                [x for x, _ in points], [y for _, y in points], s=62, marker=marker(index), color=color(index),
                edgecolors=CARD, linewidths=0.8, zorder=2,
            )  # fmt: skip
        name_rows(axes, names, narrow)
        if logarithmic:
            axes.set_xscale("log")
            ticks = round_numbers(min(every), max(every), 5 if narrow else 12)
            axes.set_xticks(ticks, [format_number(tick) for tick in ticks])
            axes.set_xticks([], minor=True)
        else:
            axes.set_xlim(min(0.0, min(every) * 1.05), max(every) * 1.05 or 1.0)
        axes.set_xlabel(f"{axis} (logarithmic)" if logarithmic else axis)

    told = "; ".join(
        f"{name}: {', '.join(f'{kind} {format_number(value)}' for kind, value in each.items())}"
        for name, each in zip(names, values, strict=True)
    )
    keys = [Key(kind, index) for index, kind in enumerate(series)]
    return plot(title, f"In {axis}. {told}.", paint, rows_height(len(names)), keys)


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """At most so many ticks of a logarithmic axis: 1, 2 and 5 of each decade, or fewer."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for leading in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in range(first, last + 1) for step in leading]
        inside = [tick for tick in ticks if low * 0.85 <= tick <= high * 1.18]
        if len(inside) <= most:
            return inside
    return inside[:: -(-len(inside) // most)]
