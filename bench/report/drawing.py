"""Charts as lines, markers and text: SVG inside a page, and files of SVG or PNG for `--chart`.

Positions across are fractions of the width, and colours are custom properties of CSS, so that one drawing fills a wide
page and a phone at the same size of letters, in light and dark. No plotting library can write such SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, cycle, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

# x is a fraction of the width, y is in pixels from the top
Point = tuple[float, float]

# light and dark; series are Okabe and Ito's colours in an order in which neighbours lie far apart,
# changed only until their contrast to the card is 3:1 (WCAG 1.4.11), on dark 4.5:1
COLORS = {
    "ink": ("#1c1c1a", "#ecebe6"),
    "soft": ("#5d5d58", "#a9a8a1"),
    "line": ("#dcdcd6", "#3a3a37"),
    "card": ("#ffffff", "#1f1f1d"),
    "s0": ("#0072b2", "#338ec1"),
    "s1": ("#d55e00", "#d7660d"),
    "s2": ("#009e73", "#009e73"),
    "s3": ("#cc79a7", "#cc79a7"),
    "s4": ("#c68900", "#e69f00"),
    "s5": ("#4b9dcb", "#56b4e9"),
    "s6": ("#5b5b5b", "#868686"),
    "s7": ("#9e962c", "#f0e442"),
}
NUM_COLORS = 8
_DASHES: tuple[tuple[int, ...], ...] = ((), (7, 3), (2, 3), (8, 3, 2, 3))
# so many that a repeated colour has another shape
_MARKERS: tuple[tuple[Point, ...], ...] = (
    tuple((4.6 * math.cos(step * math.pi / 12), 4.6 * math.sin(step * math.pi / 12)) for step in range(24)),
    ((-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)),
    ((0, -4.9), (4.8, 4.2), (-4.8, 4.2)),
    ((0, -5.6), (5.6, 0), (0, 5.6), (-5.6, 0)),
    ((0, 4.9), (4.8, -4.2), (-4.8, -4.2)),
)

# of a file, in pixels; a PNG has _SCALE pixels for each
_WIDTH, _MARGIN, _FONT_SIZE, _SCALE = 880, 20, 13, 2
_SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Line:
    """A straight line; a bar is a wide one."""

    start: Point
    end: Point
    color: str = "line"
    width: float = 1.0
    dash: tuple[int, ...] = ()

    @property
    def svg(self) -> str:
        """The line as an SVG element."""
        (x1, y1), (x2, y2) = self.start, self.end
        dash = f"; stroke-dasharray: {' '.join(map(str, self.dash))}" if self.dash else ""
        style = f"stroke: var(--{self.color}); stroke-width: {self.width:g}{dash}"
        return f'<line x1="{x1:.2%}" y1="{y1:g}" x2="{x2:.2%}" y2="{y2:g}" style="{style}"/>'


@dataclass(frozen=True)
class Marker:
    """The marker of a series; a hollow one has the card's colour inside."""

    start: Point
    series: int
    hollow: bool = False

    @property
    def svg(self) -> str:
        """The marker as a reference to its shape in `marker_definitions`."""
        color = f"var(--{series_color(self.series)})"
        style = f"fill: var(--card); stroke: {color}; stroke-width: 1.6" if self.hollow else f"fill: {color}"
        place = f'x="{self.start[0]:.2%}" y="{self.start[1]:g}"'
        return f'<use href="#marker-{self.series % len(_MARKERS)}" {place} style="{style}"/>'


@dataclass(frozen=True)
class Text:
    """A line of text; `anchor` is `start`, `middle` or `end`."""

    start: Point
    text: str
    anchor: str = "start"
    color: str = "ink"

    @property
    def svg(self) -> str:
        """The text as an SVG element."""
        place = f'x="{self.start[0]:.2%}" y="{self.start[1]:g}" text-anchor="{self.anchor}"'
        return f'<text {place} style="fill: var(--{self.color})">{escape(self.text)}</text>'


Element = Line | Marker | Text


@dataclass(frozen=True)
class Key:
    """One entry of a legend; `kind` is how its series is drawn: `marker`, `bar`, `line` or `dashed`."""

    label: str
    series: int
    kind: str = "marker"

    def symbol(self, x: float, y: float, width: float) -> Element:
        """Return the series' symbol around a point, `width` being 12 pixels as a fraction of the drawing's width."""
        if self.kind == "marker":
            return Marker((x, y), self.series)
        dash = series_dash(self.series) if self.kind == "dashed" else ()
        stroke = 12 if self.kind == "bar" else 2
        return Line((x - width / 2, y), (x + width / 2, y), series_color(self.series), stroke, dash)

    @property
    def svg(self) -> str:
        """The symbol as the content of an SVG of 12 by 12 pixels."""
        return self.symbol(0.5, 6, 1).svg


@dataclass(frozen=True)
class Chart:
    """A drawing with its title, a description for somebody who cannot see it, height in pixels, legend and note."""

    title: str
    description: str
    elements: tuple[Element, ...]
    height: int
    legend: tuple[Key, ...] = ()
    note: str = ""

    @property
    def svg(self) -> str:
        """The drawing as the content of an SVG as wide as its place in the page."""
        return _to_svg(self.elements)


def series_color(series: int) -> str:
    """Return the name of a series' colour."""
    return f"s{series % NUM_COLORS}"


def series_dash(series: int) -> tuple[int, ...]:
    """Return the dashes of a series of long lines without markers."""
    return _DASHES[series % len(_DASHES)]


def css_colors(*, dark: bool) -> str:
    """Return the custom properties of CSS that drawings take their colours from."""
    return " ".join(f"--{name}: {shades[dark]};" for name, shades in COLORS.items())


def marker_definitions() -> str:
    """Return the markers' shapes, which drawings refer to; they stand once in a document."""
    return "".join(
        f'<path id="marker-{index}" d="M{"L".join(f"{x:.2f} {y:.2f}" for x, y in shape)}Z"/>'
        for index, shape in enumerate(_MARKERS)
    )


def check_chart_path(path: Path | None) -> None:
    """Check before any work is done that a chart can be written.

    Raises:
        UsageError: the name has another suffix than .svg and .png, or there is no such folder.
    """
    if path is None:
        return
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--chart {path}: expected a name that ends in {' or '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--chart {path}: no such folder; make it first")


def write_charts(charts: Sequence[Chart], heading: str, path: Path) -> None:
    """Write charts one below the other as an SVG or, by the suffix, as a PNG.

    Raises:
        UsageError: the file cannot be written.
    """
    blocks, height = _stack_charts(charts, heading)
    try:
        if path.suffix.lower() == ".png":
            _rasterize(blocks, height).save(path)
        else:
            path.write_text(_to_document(blocks, height), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--chart {path}: cannot be written ({error.strerror or error}); choose another") from None


def _to_svg(elements: Iterable[Element]) -> str:
    return "".join(element.svg for element in elements)


def _stack_charts(charts: Sequence[Chart], heading: str) -> tuple[list[tuple[int, list[Element]]], int]:
    """Return blocks of elements with the height at which each begins, and the height of all."""
    blocks: list[tuple[int, list[Element]]] = [(0, [Text((0, 18), heading)])]
    top = 60
    for chart in charts:
        blocks.append((top, [Text((0, 0), chart.title), Text((0, 18), chart.note, color="soft")]))
        blocks.append((top + 30, list(chart.elements)))
        top += 30 + chart.height
        for index, key in enumerate(chart.legend):
            x, y = 0.02 + 0.5 * (index % 2), index // 2 * 20
            blocks.append((top + y, [key.symbol(x, 10, 12 / _WIDTH), Text((x + 0.015, 14), key.label)]))
        top += (len(chart.legend) + 1) // 2 * 20 + 36
    return blocks, top - 24


def _to_document(blocks: Sequence[tuple[int, list[Element]]], height: int) -> str:
    content = "".join(f'<svg y="{top}" overflow="visible">{_to_svg(elements)}</svg>' for top, elements in blocks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _MARGIN}" height="{height + 2 * _MARGIN}">'
        f"<style>:root {{ {css_colors(dark=False)} }} @media (prefers-color-scheme: dark) {{ :root {{ "
        f"{css_colors(dark=True)} }} }} svg {{ font: {_FONT_SIZE}px system-ui, sans-serif }}</style>"
        f'<defs>{marker_definitions()}</defs><rect width="100%" height="100%" style="fill: var(--card)"/>'
        f'<svg x="{_MARGIN}" y="{_MARGIN}" width="{_WIDTH}" overflow="visible">{content}</svg></svg>\n'
    )


def _rasterize(blocks: Sequence[tuple[int, list[Element]]], height: int) -> Image:
    from PIL import Image, ImageDraw, ImageFont

    palette = {name: light for name, (light, _) in COLORS.items()}
    size = ((_WIDTH + 2 * _MARGIN) * _SCALE, (height + 2 * _MARGIN) * _SCALE)
    image = Image.new("RGB", size, palette["card"])
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT_SIZE * _SCALE)

    def to_pixels(point: Point, top: int) -> Point:
        return (point[0] * _WIDTH + _MARGIN) * _SCALE, (point[1] + top + _MARGIN) * _SCALE

    for top, element in ((top, element) for top, elements in blocks for element in elements):
        x, y = to_pixels(element.start, top)
        if isinstance(element, Text):
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[element.anchor]
            draw.text((x, y), element.text, fill=palette[element.color], font=font, anchor=anchor)
        elif isinstance(element, Marker):
            color = palette[series_color(element.series)]
            shape = [(x + dx * _SCALE, y + dy * _SCALE) for dx, dy in _MARKERS[element.series % len(_MARKERS)]]
            draw.polygon(shape, fill=palette["card"] if element.hollow else color, outline=color, width=_SCALE)
        else:
            for piece in _split_dashes((x, y), to_pixels(element.end, top), element.dash):
                draw.line(piece, fill=palette[element.color], width=round(element.width * _SCALE))
    return image


def _split_dashes(start: Point, end: Point, dash: Sequence[int]) -> Iterator[tuple[Point, Point]]:
    length = math.dist(start, end) or 1.0
    inner = takewhile(lambda edge: edge < length, accumulate(step * _SCALE for step in cycle(dash)))
    edges = [edge / length for edge in (0.0, *inner, length)]
    for pair in zip(edges[::2], edges[1::2], strict=False):
        first, last = ((start[0] + (end[0] - start[0]) * at, start[1] + (end[1] - start[1]) * at) for at in pair)
        yield first, last
