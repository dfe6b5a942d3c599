"""The classic roofline: FLOPs a second over FLOPs per byte, both logarithmic, with networks and heads as points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.bench.overhead.chart import save
from opal_deploy.bench.roofline.ceiling import Ceiling
from opal_deploy.bench.roofline.table import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP*Xh<>d"


def draw(points: Sequence[Point], ceilings: Sequence[Ceiling], path: Path) -> None:
    """A line for each ceiling; each network and its head stand on the roof of each, where they would be at most.

    Raises:
        UsageError: it cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = [point for point in points if point.part != "network"]
    first = shown[0]
    roofs = _distinct([ceiling for ceiling in ceilings if first.precision in ceiling.flops], first.precision)
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    axes = figure.subplots()
    low, high = _limits(shown, roofs)
    for place, ceiling in enumerate(roofs):
        color, style = _COLORS[place % len(_COLORS)], _STYLES[place // len(_COLORS) % len(_STYLES)]
        _roof(axes, ceiling, first.precision, (low, high), color, style)
    backbones = list(dict.fromkeys(point.backbone for point in shown))
    for point in shown:
        place = backbones.index(point.backbone)
        for ceiling in roofs:
            axes.plot(
                point.intensity,
                ceiling.attainable(point.intensity, point.precision) / 1e12,
                _MARKERS[place % len(_MARKERS)],
                color="black",
                markerfacecolor="black" if point.part == "backbone" else "white",
                markersize=5,
                zorder=3,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("arithmetic intensity, FLOPs per byte")
    axes.set_ylabel("TOP/s" if first.precision == "int8" else "TFLOP/s")
    axes.grid(which="major", color="#dddddd")
    axes.set_title(
        f"Roofline, {first.precision}, batch {first.batch}: where each network may be at most", loc="left", fontsize=12
    )
    marks: list[Line2D] = [
        Line2D([], [], color="black", marker=_MARKERS[place % len(_MARKERS)], linestyle="", label=name)
        for place, name in enumerate(backbones)
    ]
    marks.append(
        Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label="its head (hollow)")
    )
    handles = [*axes.get_legend_handles_labels()[0], *marks]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save(figure, path)


def _roof(axes: Axes, ceiling: Ceiling, precision: str, ends: tuple[float, float], color: str, style: str) -> None:
    ridge = ceiling.ridge(precision)
    x = sorted({ends[0], min(max(ridge, ends[0]), ends[1]), ends[1]})
    y = [ceiling.attainable(value, precision) / 1e12 for value in x]
    axes.plot(x, y, color=color, linestyle=style, linewidth=1.8, label=ceiling.name, zorder=2)


def _distinct(ceilings: list[Ceiling], precision: str) -> list[Ceiling]:
    """One line for all that have the same roof, under all their names."""
    together: dict[tuple[float, float], list[Ceiling]] = {}
    for ceiling in ceilings:
        together.setdefault((ceiling.peak(precision), ceiling.bytes_per_second), []).append(ceiling)
    return [replace(same[0], name=" and\n".join(one.name for one in same)) for same in together.values()]


def _limits(points: Sequence[Point], ceilings: Sequence[Ceiling]) -> tuple[float, float]:
    """So that every point and every ridge is inside, with room."""
    at = [point.intensity for point in points] + [ceiling.ridge(points[0].precision) for ceiling in ceilings]
    return 10 ** (math.log10(min(at)) - 0.35), 10 ** (math.log10(max(at)) + 0.35)
