"""Memory over the time of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opal_deploy.bench.report.charts.series import MOST_SERIES
from opal_deploy.bench.report.drawing import Key, Plot, color, dash, plot
from opal_deploy.bench.report.tables import Row, labels
from opal_deploy.bench.tables import format_number, humanize, is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def memory_over_time(rows: Sequence[Row]) -> list[Plot]:
    """The curves in the details of all rows, in plots of a few each."""
    curves = []
    for row, label in zip(rows, labels(rows), strict=True):
        for variant, seconds, megabytes in _curves(row.measurement.details):
            name = ", ".join(part for part in (label, humanize(variant)) if part)
            curves.append((name, seconds, megabytes))
    groups = [curves[start : start + MOST_SERIES] for start in range(0, len(curves), MOST_SERIES)]
    return [_plot(group, f", part {place}" if len(groups) > 1 else "") for place, group in enumerate(groups, 1)]


def _curves(details: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, list[float], list[float]]]:
    """Wherever they lie in the details: {"seconds": [...], "megabytes": [...]}."""
    seconds, megabytes = details.get("seconds"), details.get("megabytes")
    if isinstance(seconds, list) and isinstance(megabytes, list):
        if len(seconds) == len(megabytes) > 1 and all(map(is_number, [*seconds, *megabytes])):
            yield name, seconds, megabytes
        return
    for key, value in details.items():
        if isinstance(value, Mapping):
            yield from _curves(value, str(key))


def _plot(curves: Sequence[tuple[str, list[float], list[float]]], part: str) -> Plot:
    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        for place, (_, seconds, megabytes) in enumerate(curves):
            axes.plot(seconds, megabytes, color=color(place), linestyle=dash(place), linewidth=1.8)
        axes.set_ylim(0, max(max(megabytes) for _, _, megabytes in curves) * 1.08)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds")
        axes.set_ylabel("resident memory, MB")

    told = "; ".join(
        f"{name}: {format_number(mb[0])} MB at first, {format_number(mb[-1])} at last" for name, _, mb in curves
    )
    keys = [Key(name, place, "line") for place, (name, _, _) in enumerate(curves)]
    return plot(f"Memory over time{part}", f"{told}.", paint, lambda narrow: 260.0 if narrow else 300.0, keys)
