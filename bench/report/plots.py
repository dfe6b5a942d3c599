"""The two forms of a chart: named rows over one axis, and curves on two axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from opal_deploy.bench.report.drawing import (
    NUM_COLORS,
    Chart,
    Element,
    Key,
    Line,
    Marker,
    Text,
    series_color,
    series_dash,
)
from opal_deploy.bench.tables import format_number, shorten

# heights in pixels: of a named row, of its middle under the name, of an axis under a drawing, of a plane
_ROW_HEIGHT, _ROW_MIDDLE, _AXIS_HEIGHT, _PLOT_HEIGHT = 46, 31, 38, 330
# as long as fits beside a value on a phone
_MAX_LABEL = 44
# largest over smallest: beyond this, small values would lie on top of each other on a linear axis
_LOGARITHMIC = 12.0


@dataclass(frozen=True)
class Scale:
    """The values of an axis, from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def from_zero(cls, values: Iterable[float]) -> Scale:
        """Return a linear scale that shows zero and all values."""
        every = [0.0, *values]
        low, high = min(every), max(every) * 1.03
        return cls(low, high if high > low else low + 1.0)

    def __call__(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, limit: int) -> list[float]:
        """Return about so many round values; of a logarithmic scale 1, 2 and 5 of each decade, or fewer."""
        if not self.logarithmic:
            size = (self.high - self.low) / limit
            power = 10.0 ** math.floor(math.log10(size))
            step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [round(number * step, 12) for number in range(first, last + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        ticks: list[float] = []
        for leading in ((1, 2, 5), (1, 3), (1,)):
            every = (step * 10.0**decade for decade in decades for step in leading)
            ticks = [tick for tick in every if self.low <= tick <= self.high]
            if len(ticks) <= limit:
                return ticks
        return ticks[:: -(-len(ticks) // limit)]


@dataclass(frozen=True)
class ChartRow:
    """A named row: points (value, series), or bars one after the other, a series each; `value` stands at the right."""

    label: str
    value: str
    points: Sequence[tuple[float, int]] = ()
    interval: tuple[float, float] | None = None
    bars: Sequence[float] = ()


@dataclass(frozen=True)
class CurvePoint:
    """A point of a curve, with the ends of an upright line through it."""

    x: float
    y: float
    reach: tuple[float, float] | None = None
    hollow: bool = False


@dataclass(frozen=True)
class Curve:
    """Points in the order they are connected; `style` is `line`, `dashed`, `marker` (no line) or `both`."""

    label: str
    points: Sequence[CurvePoint]
    style: str = "both"


def draw_rows(
    title: str, rows: Sequence[ChartRow], unit: str, legend: tuple[Key, ...] = (), note: str = "", center: float = 0.0
) -> Iterator[Chart]:
    """Draw named rows over one axis; with a center, which is dashed, the axis need not show zero."""
    values = [value for row in rows for value in (*(v for v, _ in row.points), *(row.interval or ()))]
    scale = Scale.from_zero([*values, *(sum(row.bars) for row in rows)])
    if center:
        margin = 0.06 * (max(*values, center) - min(*values, center) or 0.1)
        scale = Scale(min(*values, center) - margin, max(*values, center) + margin)
    elif values and min(values) > 0 and max(values) / min(values) > _LOGARITHMIC:
        scale, unit = Scale(min(values) / 1.1, max(values) * 1.1, logarithmic=True), f"{unit} (logarithmic)"

    def place(value: float) -> float:
        return 0.015 + 0.97 * scale(value)

    ticks, bottom = scale.ticks(5), len(rows) * _ROW_HEIGHT
    elements: list[Element] = [Text((1, bottom + 33), unit, "end", "soft")]
    elements += [Text((place(tick), bottom + 14), format_number(tick), "middle", "soft") for tick in ticks]
    for index, row in enumerate(rows):
        top, y = index * _ROW_HEIGHT, index * _ROW_HEIGHT + _ROW_MIDDLE
        elements += [Text((0, top + 15), shorten(row.label, _MAX_LABEL)), Text((1, top + 15), row.value, "end", "soft")]
        elements += [Line((place(tick), y - 9), (place(tick), y + 9)) for tick in ticks]
        ends = [0.0, *accumulate(row.bars)]
        for series, (start, end) in enumerate(pairwise(ends)):
            elements.append(Line((place(start), y), (place(end), y), series_color(series), 16))
        if row.interval:
            low, high = map(place, row.interval)
            elements.append(Line((low, y), (high, y), "ink", 2))
        # the first is drawn last: where points coincide, it is seen
        elements += [Marker((place(value), y), series) for value, series in reversed(row.points)]
    if center:
        elements.append(Line((place(center), _ROW_MIDDLE - 12), (place(center), bottom), "ink", 1.2, (4, 3)))
    description = f"{unit}: {'; '.join(f'{row.label} {row.value}' for row in rows)}."
    if rows:
        yield Chart(title, description, tuple(elements), bottom + _AXIS_HEIGHT, legend, note)


def draw_curves(
    title: str, curves: Sequence[Curve], scales: tuple[Scale, Scale], titles: tuple[str, str], note: str = "",
    x_ticks: Sequence[float] = (), limit: int = NUM_COLORS,
) -> Iterator[Chart]:  # fmt: skip
    """Draw curves on two axes, at most `limit` in a chart; the y values stand on their lines, which saves width."""

    def place(x: float, y: float) -> tuple[float, float]:
        return 0.1 + 0.87 * scales[0](x), _PLOT_HEIGHT - (_PLOT_HEIGHT - 16) * scales[1](y)

    low_x, low_y = scales[0].low, scales[1].low
    axes: list[Element] = [Text((1, _PLOT_HEIGHT + 34), titles[0], "end", "soft")]
    y_ticks = scales[1].ticks(6)
    for tick in y_ticks:
        _, y = place(low_x, tick)
        label = f"{format_number(tick)} {titles[1]}" if tick == y_ticks[-1] else format_number(tick)
        axes += [Line((0, y), (1, y)), Text((0, y - 4), label, color="soft")]
    for tick in x_ticks or scales[0].ticks(6):
        axes.append(Text((place(tick, low_y)[0], _PLOT_HEIGHT + 16), format_number(tick), "middle", "soft"))
    parts = -(-len(curves) // limit)
    for part in range(parts):
        group = curves[part * len(curves) // parts : (part + 1) * len(curves) // parts]
        elements = axes + [element for i, curve in enumerate(group) for element in _draw_curve(curve, i, place)]
        keys = (Key(c.label, i, "marker" if c.style == "both" else c.style) for i, c in enumerate(group))
        description = f"{titles[1]} over {titles[0]}: {'; '.join(map(_describe_curve, group))}."
        name = f"{title}, part {part + 1}" if parts > 1 else title
        yield Chart(name, description, tuple(elements), _PLOT_HEIGHT + _AXIS_HEIGHT, tuple(keys), note)


def _draw_curve(curve: Curve, series: int, place: Callable[[float, float], tuple[float, float]]) -> Iterator[Element]:
    color, dash = series_color(series), series_dash(series) if curve.style == "dashed" else ()
    # SVG takes no fractions of the width in a polyline
    for a, b in pairwise(curve.points) if curve.style != "marker" else ():
        yield Line(place(a.x, a.y), place(b.x, b.y), color, 2, dash)
    for point in curve.points:
        if point.reach:
            low, high = (place(point.x, end) for end in point.reach)
            yield Line(low, high, color if curve.style == "both" else "line", 2)
        if curve.style in ("marker", "both"):
            yield Marker(place(point.x, point.y), series, point.hollow)


def _describe_curve(curve: Curve) -> str:
    first, last = (format_number(curve.points[index].y) for index in (0, -1))
    return f"{curve.label} from {first} to {last}"
