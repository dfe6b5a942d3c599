"""The roofline: what each device allows at the arithmetic intensity of each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.report.charts.dots import round_numbers
from opal_deploy.bench.report.charts.series import batch_of, figure_in, titled
from opal_deploy.bench.report.drawing import CARD, GRID, Key, Plot, color, dash, marker, plot
from opal_deploy.bench.report.tables import Row
from opal_deploy.bench.tables import format_number, format_value, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_UNIT = "FLOPs/byte"
# with few roofs, each network stands on each; with many, only at the foot
_FEW_ROOFS = 3

# FLOPs a second, bytes a second
Roof = tuple[float, float]


def roofline(rows: Sequence[Row]) -> list[Plot]:
    """A plot for each precision and batch: intensities from the figures, roofs from `details.ceilings`."""
    groups: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        if figure_in(row.measurement, _UNIT):
            subject = row.measurement.target
            groups.setdefault((subject.precision if subject else "", batch_of(row.measurement)), []).append(row)
    out = []
    for (precision, batch), members in groups.items():
        facet = ", ".join(t for t in (precision, f"batch {batch}" if batch else "") if t) if len(groups) > 1 else ""
        if roofs := _roofs(members):
            out.append(_plot(_points(members), roofs, facet))
    return out


def _points(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Part (backbone, head) -> network -> FLOPs per byte; backbone and head together add nothing to the picture."""
    out: dict[str, dict[str, float]] = {}
    for row in rows:
        found, subject = figure_in(row.measurement, _UNIT), row.measurement.target
        part = format_value(row.measurement.case.get("part") or "network")
        if found is not None and found[1].value > 0:
            name = format_value((subject.backbone or subject.name) if subject else "")
            out.setdefault(part, {})[name] = found[1].value
    return {part: names for part, names in out.items() if part != "network"} or out


def _roofs(rows: Sequence[Row]) -> dict[Roof, str]:
    """Those of all rows, with the names of all devices that have the same."""
    names: dict[Roof, dict[str, None]] = {}
    for row in rows:
        for each in _ceilings(row.measurement):
            roof = float(each["flops"]), float(each["bytes_per_second"])
            names.setdefault(roof, {})[format_value(each.get("name", "device"))] = None
    return {roof: ", ".join(found) for roof, found in names.items()}


def _ceilings(measurement: Measurement) -> list[Mapping[str, Any]]:
    listed = measurement.details.get("ceilings")
    return [
        each
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, Mapping)
        and all(is_number(each.get(name)) and each[name] > 0 for name in ("flops", "bytes_per_second"))
    ]


def _plot(points: dict[str, dict[str, float]], roofs: dict[Roof, str], facet: str) -> Plot:
    names = list(dict.fromkeys(name for found in points.values() for name in found))
    at = [value for found in points.values() for value in found.values()]
    low = min([*at, *(flops / speed for flops, speed in roofs)]) / 2.5
    high = max([*at, *(flops / speed for flops, speed in roofs)]) * 2.5
    floor = min(_reached(roof, low) for roof in roofs)
    top = max(flops for flops, _ in roofs)

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        for place, (flops, speed) in enumerate(roofs):
            xs = sorted({low, flops / speed, high})
            axes.plot(xs, [_reached((flops, speed), x) for x in xs], color=color(place), linestyle=dash(place))
        for part, found in points.items():
            for name, x in found.items():
                _stand(axes, x, floor, list(roofs), names.index(name), hollow=part == "head")
        axes.set_xlim(low, high)
        axes.set_ylim(floor / 1.5, top * 1.6)
        ticks = round_numbers(low, high, 5 if narrow else 10)
        axes.set_xticks(ticks, [format_number(tick) for tick in ticks])
        ticks = round_numbers(floor, top, 6)
        axes.set_yticks(ticks, [format_number(tick / 1e12) for tick in ticks])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([], minor=True)
        axes.set_xlabel("arithmetic intensity, FLOPs per byte")
        axes.set_ylabel("at most, TFLOP/s")

    told = "; ".join(f"{part} {name} {format_number(x)}" for part, found in points.items() for name, x in found.items())
    tops = "; ".join(
        f"{name} {format_number(f / 1e12)} TFLOP/s, {format_number(s / 1e9)} GB/s" for (f, s), name in roofs.items()
    )
    return plot(
        titled("Roofline", facet),
        f"FLOPs per byte: {told}. Roofs: {tops}.",
        paint,
        lambda narrow: 330.0 if narrow else 420.0,
        [Key(name, place, "line") for place, name in enumerate(roofs.values())]
        + [Key(name, place) for place, name in enumerate(names)],
        "Lines: what each device allows. Points: how much arithmetic each network does; hollow ones are heads alone.",
    )


def _stand(axes: Axes, x: float, floor: float, roofs: Sequence[Roof], series: int, *, hollow: bool) -> None:
    """One network: a line up to the highest roof, and its marker where it meets roofs, or at the foot."""
    meets = [_reached(roof, x) for roof in roofs]
    axes.vlines(x, floor / 1.5, max(meets), colors=GRID, linewidth=1.2, zorder=1)
    for y in meets if len(meets) <= _FEW_ROOFS else [floor / 1.2]:
        axes.plot(
            x, y, marker=marker(series), color=color(series), markerfacecolor=CARD if hollow else color(series),
            markersize=7.5, markeredgewidth=1.6 if hollow else 0.0, zorder=3,
        )  # fmt: skip


def _reached(roof: Roof, intensity: float) -> float:
    flops, speed = roof
    return min(flops, intensity * speed)
