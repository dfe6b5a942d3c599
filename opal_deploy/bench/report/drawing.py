"""Charts as plain SVG; the option `--chart` writes them as files of SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.bench.tables import format_number, shorten
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

Point = tuple[float, float]

INK, SOFT, GRID, CARD = "#1c1c1a", "#5d5d58", "#dcdcd6", "#ffffff"
# Okabe and Ito's in an order in which neighbours lie far apart, with a contrast to the card of 3:1 (WCAG 1.4.11)
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c68900", "#4b9dcb", "#5b5b5b", "#9e962c")
# so many that a repeated colour has another shape: circle, square, triangle, diamond, triangle
_MARKERS: tuple[tuple[Point, ...], ...] = (
    tuple((4.6 * math.cos(step * math.pi / 8), 4.6 * math.sin(step * math.pi / 8)) for step in range(16)),
    ((-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)),
    ((0, -4.9), (4.8, 4.2), (-4.8, 4.2)),
    ((0, -5.6), (5.6, 0), (0, 5.6), (-5.6, 0)),
    ((0, 4.9), (4.8, -4.2), (-4.8, -4.2)),
)
# in pixels; heights of the title with its note, of a named row, of a plane for curves, of an axis
WIDTH, _MARGIN, _FONT_SIZE = 880, 20, 13
_TITLE, _ROW, _PLANE, _AXIS = 50, 44, 320, 44
_MAX_LABEL, _PNG_SCALE = 100, 2


@dataclass(frozen=True)
class Element:
    """A line through points in pixels; with `fill` a polygon; with `text` a text at its one point."""

    points: Sequence[Point]
    color: str = GRID
    width: float = 1
    fill: str = ""
    text: str = ""
    anchor: str = "start"

    @property
    def svg(self) -> str:
        """The element in SVG."""
        if self.text:
            ((x, y),) = self.points
            place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{self.anchor}"'
            return f'<text {place} fill="{self.color}">{escape(self.text)}</text>'
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)
        name, style = "polygon" if self.fill else "polyline", f'stroke="{self.color}" stroke-width="{self.width:g}"'
        return f'<{name} points="{points}" fill="{self.fill or "none"}" {style}/>'


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

    def ticks(self, limit: int = 6) -> list[float]:
        """Return about so many round values; of a logarithmic scale 1, 2 and 5 of each decade, or fewer."""
        if not self.logarithmic:
            size = (self.high - self.low) / limit
            power = 10.0 ** math.floor(math.log10(size))
            step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [round(number * step, 12) for number in range(first, last + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = [[step * 10.0**decade for decade in decades for step in steps] for steps in ((1, 2, 5), (1, 3), (1,))]
        choices = [[tick for tick in ticks if self.low <= tick <= self.high] for ticks in every]
        return next((ticks for ticks in choices if len(ticks) <= limit), choices[-1][:: -(-len(choices[-1]) // limit)])


@dataclass
class Chart:
    """A drawing WIDTH wide, to which marks are added in the values of its axes.

    Attributes:
        description: the chart for somebody who cannot see it.
        height: in pixels.
        place: turns values of both axes into pixels.
        elements: what is drawn.
    """

    description: str
    height: int
    place: Callable[[float, float], Point]
    elements: list[Element]
    _keys: int = 0

    @property
    def svg(self) -> str:
        """The elements in SVG."""
        return "".join(element.svg for element in self.elements)

    def line(self, points: Iterable[Point], color: int | str, width: float = 0) -> None:
        """Draw a line through values, in a colour or that of a series; a wide one is a bar."""
        self.elements.append(_line([self.place(*point) for point in points], color, width))

    def mark(self, x: float, y: float, series: int, *, hollow: bool = False) -> None:
        """Draw the marker of a series."""
        self.elements.append(_marker(self.place(x, y), series, hollow=hollow))

    def add_key(self, series: int, label: str, style: str = "both") -> None:
        """Add a series to the legend, in the style that it is drawn in: `bar`, `line`, `marker` or `both`."""
        x, y = (0, self.height - 10) if self._keys % 2 == 0 else (WIDTH // 2, self.height - 30)
        self.height, self._keys = self.height + (20 if x == 0 else 0), self._keys + 1
        if style != "marker":
            self.elements.append(_line([(x, y), (x + 24, y)], series, 12 if style == "bar" else 0))
        if style in ("marker", "both"):
            self.elements.append(_marker((x + 12, y), series))
        self.elements.append(_write(x + 32, y + 4, shorten(label, _MAX_LABEL // 2)))
        self.description += f" {label};"


def start_chart(
    title: str, note: str, x: tuple[str, Scale], y: tuple[str, Scale] | None = None,
    rows: Sequence[tuple[str, str]] = (), ticks: Sequence[float] = (),
) -> Chart:  # fmt: skip
    """Return a chart with its axes.

    Args:
        title: of the chart.
        note: one line that explains it.
        x: title and scale.
        y: title and scale; None for a chart of rows, where y is the row's index.
        rows: for each row its name and what stands at its right.
        ticks: values of x to label; by default those of the scale.
    """
    left, bottom = (70, _TITLE + _PLANE) if y else (12, _TITLE + len(rows) * _ROW)

    def place(a: float, b: float) -> Point:
        top = bottom - (_PLANE - 24) * y[1](b) if y else _TITLE + 30 + _ROW * b
        return left + (WIDTH - left - 12) * x[1](a), top

    elements = [_write(0, 16, title), _write(0, 34, note, color=SOFT), _write(WIDTH, bottom + 34, x[0], "end", SOFT)]
    for tick in ticks or x[1].ticks():
        at, _ = place(tick, y[1].low if y else 0)
        elements.append(Element([(at, _TITLE), (at, bottom)]))
        elements.append(_write(at, bottom + 15, format_number(tick), "middle", SOFT))
    if y:
        elements.append(_write(0, _TITLE + 8, y[0], color=SOFT))
    for tick in y[1].ticks() if y else ():
        _, at = place(x[1].low, tick)
        elements += [Element([(left, at), (WIDTH, at)]), _write(left - 8, at + 4, format_number(tick), "end", SOFT)]
    for index, (name, value) in enumerate(rows):
        top = _TITLE + 14 + _ROW * index
        elements += [_write(0, top, shorten(name, _MAX_LABEL)), _write(WIDTH, top, value, "end", SOFT)]
    axes = f"{y[0]} over {x[0]}" if y else x[0]
    description = f"{title}. {axes}:{''.join(f' {name} {value};' for name, value in rows)}"
    return Chart(description, bottom + _AXIS + 10, place, elements)


def check_chart_path(path: Path | None) -> None:
    """Check before any work is done that a chart can be written.

    Raises:
        UsageError: the name has another suffix than .svg and .png, or there is no such folder.
    """
    if path is not None and path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"--chart {path}: expected a name that ends in .svg or .png")
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"--chart {path}: no such folder; make it first")


def write_charts(charts: Sequence[Chart], heading: str, path: Path) -> None:
    """Write charts one below the other as an SVG or, by the suffix, as a PNG.

    Raises:
        UsageError: the file cannot be written.
    """
    elements, height, width = [_write(_MARGIN, 36, heading)], 70, WIDTH + 2 * _MARGIN
    for chart in charts:
        for element in chart.elements:
            elements.append(replace(element, points=[(x + _MARGIN, y + height) for x, y in element.points]))
        height += chart.height + _MARGIN
    try:
        if path.suffix.lower() == ".png":
            _draw_png(elements, width, height).save(path)
            return
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="{_FONT_SIZE}" '
        head += f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="{CARD}"/>'
        path.write_text(f"{head}{''.join(element.svg for element in elements)}</svg>\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--chart {path}: cannot be written ({error.strerror or error}); choose another") from None


def _draw_png(elements: Sequence[Element], width: int, height: int) -> Image:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width * _PNG_SCALE, height * _PNG_SCALE), CARD)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_FONT_SIZE * _PNG_SCALE)
    for element in elements:
        points = [(x * _PNG_SCALE, y * _PNG_SCALE) for x, y in element.points]
        stroke = round(element.width * _PNG_SCALE)
        if element.text:
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[element.anchor]
            draw.text(points[0], element.text, element.color, font, anchor)
        elif element.fill:
            draw.polygon(points, element.fill, element.color, stroke)
        else:
            draw.line(points, element.color, stroke)
    return image


def _get_color(color: int | str) -> str:
    return color if isinstance(color, str) else _SERIES[color % len(_SERIES)]


def _line(points: Sequence[Point], color: int | str, width: float) -> Element:
    # the width tells lines of the same colour apart
    thin = isinstance(color, int) and color // len(_SERIES) % 2
    return Element(points, _get_color(color), width or (0.8 if thin else 2))


def _marker(at: Point, series: int, *, hollow: bool = False) -> Element:
    shape = [(at[0] + x, at[1] + y) for x, y in _MARKERS[series % len(_MARKERS)]]
    return Element(shape, _get_color(series), 1.5, CARD if hollow else _get_color(series))


def _write(x: float, y: float, text: str, anchor: str = "start", color: str = INK) -> Element:
    return Element([(x, y)], color, text=text, anchor=anchor)
