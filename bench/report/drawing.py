"""Drawings of lines, bars, markers and text as SVG.

Positions across are fractions of the width, and colours are custom properties of CSS, so that one drawing fills a wide
page and a phone at the same size of letters, in light and dark. No plotting library can write such SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from opal_deploy.visualization.palette import BASE_COLORS, BLACK, RGB, WHITE, contrast_ratio, to_hex

# x is a fraction of the width, y is in pixels from the top
Point = tuple[float, float]

# of the page, by name: light and dark
_COLORS = {
    "ink": ("#1c1c1a", "#ecebe6"),
    "soft": ("#5d5d58", "#a9a8a1"),
    "line": ("#dcdcd6", "#3a3a37"),
    "card": ("#ffffff", "#1f1f1d"),
}
# lines on a card need a contrast of 3:1 (WCAG 1.4.11), which looks dull on dark
_CARDS: tuple[tuple[RGB, float], ...] = (((255, 255, 255), 3.0), ((31, 31, 29), 4.5))
# without the yellow, which no white page can show as a line; in an order in which neighbours lie far apart
_HUES = tuple(BASE_COLORS[index] for index in (0, 2, 7, 4, 6, 3, 5))
_DASHES: tuple[tuple[int, ...], ...] = ((), (7, 3), (2, 3), (8, 3, 2, 3))
_CIRCLE = tuple((4.6 * math.cos(step * math.pi / 12), 4.6 * math.sin(step * math.pi / 12)) for step in range(24))
MARKERS: tuple[tuple[Point, ...], ...] = (
    _CIRCLE,
    ((-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)),
    ((0, -4.9), (4.8, 4.2), (-4.8, 4.2)),
    ((0, -5.6), (5.6, 0), (0, 5.6), (-5.6, 0)),
    ((0, 4.9), (4.8, -4.2), (-4.8, -4.2)),
    ((-5, -1.7), (-1.7, -1.7), (-1.7, -5), (1.7, -5), (1.7, -1.7), (5, -1.7), (5, 1.7), (1.7, 1.7), (1.7, 5),
     (-1.7, 5), (-1.7, 1.7), (-5, 1.7)),
    ((0, -5), (4.8, -1.5), (2.9, 4.1), (-2.9, 4.1), (-4.8, -1.5)),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A straight line; x is a fraction of the width, y is in pixels from the top, here and in all elements."""

    start: Point
    end: Point
    color: str = "line"
    width: float = 1.0
    dash: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A filled rectangle."""

    start: Point
    end: Point
    color: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Marker:
    """The marker of a series; a hollow one has the card's colour inside."""

    start: Point
    series: int
    hollow: bool = False


@dataclass(frozen=True)
class Text:
    """A line of text; `anchor` is `start`, `middle` or `end`."""

    start: Point
    text: str
    anchor: str = "start"
    color: str = "ink"


Element = Line | Bar | Marker | Text


@dataclass(frozen=True)
class Key:
    """One entry of a legend; `kind` is how its series is drawn: `marker`, `bar`, `line` or `dashed`."""

    label: str
    series: int
    kind: str = "marker"

    def symbol(self, x: float, y: float, width: float) -> Element:
        """Return the series' symbol around a point, `width` being 12 pixels as a fraction of the drawing's width."""
        left, right, color = x - width / 2, x + width / 2, series_color(self.series)
        if self.kind == "bar":
            return Bar((left, y - 6), (right, y + 6), color, bar_opacity(self.series))
        if self.kind == "marker":
            return Marker((x, y), self.series)
        return Line((left, y), (right, y), color, 2.0, series_dash(self.series) if self.kind == "dashed" else ())

    @property
    def svg(self) -> str:
        """The symbol as the content of an SVG of 12 by 12 pixels."""
        return to_svg([self.symbol(0.5, 6, 1)])


@dataclass(frozen=True)
class Chart:
    """A drawing with what a page says about it.

    Attributes:
        title: what it shows.
        description: for somebody who cannot see it.
        elements: in the order they are drawn.
        height: in pixels.
        legend: its series.
        note: how to read it, where that is not plain.
    """

    title: str
    description: str
    elements: tuple[Element, ...]
    height: int
    legend: tuple[Key, ...] = ()
    note: str = ""

    @property
    def svg(self) -> str:
        """The drawing as the content of an SVG as wide as its place in the page."""
        return to_svg(self.elements)


def series_color(series: int) -> str:
    """Return the name of a series' colour."""
    return f"s{series % len(_HUES)}"


def bar_opacity(series: int) -> float:
    """Return the opacity of a series' bars: they have no markers, so that those with a repeated colour are paler."""
    return 1.0 if series < len(_HUES) else 0.5


def series_dash(series: int) -> tuple[int, ...]:
    """Return the dashes of a series of long lines without markers."""
    return _DASHES[series % len(_DASHES)]


def connect(points: Sequence[Point], series: int, width: float = 2.0, dash: tuple[int, ...] = ()) -> list[Line]:
    """Return lines from point to point, since SVG takes no fractions of the width in a polyline."""
    return [Line(start, end, series_color(series), width, dash) for start, end in pairwise(points)]


def colors(*, dark: bool) -> dict[str, str]:
    """Return the colours that elements name, as `#rrggbb`."""
    named = {name: shades[dark] for name, shades in _COLORS.items()}
    card, contrast = _CARDS[dark]
    named |= {f"s{index}": to_hex(_adjust(hue, card, contrast)) for index, hue in enumerate(_HUES)}
    return named


def css_colors(*, dark: bool) -> str:
    """Return the custom properties of CSS that drawings take their colours from."""
    return " ".join(f"--{name}: {color};" for name, color in colors(dark=dark).items())


def marker_definitions() -> str:
    """Return the markers' shapes, which drawings refer to; they stand once in a document."""
    return "".join(
        f'<path id="marker-{index}" d="M{"L".join(f"{x:.2f} {y:.2f}" for x, y in shape)}Z"/>'
        for index, shape in enumerate(MARKERS)
    )


def to_svg(elements: Iterable[Element]) -> str:
    """Return elements as the content of an SVG element."""
    return "".join(map(_to_svg, elements))


def _adjust(hue: RGB, background: RGB, contrast: float) -> RGB:
    """Move a hue towards black or white only until it has the contrast to the background."""
    target = BLACK if contrast_ratio(BLACK, background) > contrast_ratio(WHITE, background) else WHITE
    for step in range(101):
        red, green, blue = (round(h + (t - h) * step / 100) for h, t in zip(hue, target, strict=True))
        if contrast_ratio((red, green, blue), background) >= contrast:
            return red, green, blue
    return target


def _to_svg(element: Element) -> str:
    x, y = f"{element.start[0]:.2%}", f"{element.start[1]:g}"
    if isinstance(element, Text):
        anchor = f' text-anchor="{element.anchor}"' if element.anchor != "start" else ""
        return f'<text x="{x}" y="{y}"{anchor} style="fill: {_css(element.color)}">{escape(element.text)}</text>'
    if isinstance(element, Marker):
        color = _css(series_color(element.series))
        style = f"fill: {_css('card')}; stroke: {color}; stroke-width: 1.6" if element.hollow else f"fill: {color}"
        return f'<use href="#marker-{element.series % len(MARKERS)}" x="{x}" y="{y}" style="{style}"/>'
    if isinstance(element, Bar):
        width, height = element.end[0] - element.start[0], element.end[1] - element.start[1]
        opacity = f"; opacity: {element.opacity:g}" if element.opacity < 1 else ""
        style = f"fill: {_css(element.color)}{opacity}"
        return f'<rect x="{x}" y="{y}" width="{width:.2%}" height="{height:g}" style="{style}"/>'
    dash = f"; stroke-dasharray: {' '.join(map(str, element.dash))}" if element.dash else ""
    style = f"stroke: {_css(element.color)}; stroke-width: {element.width:g}{dash}"
    return f'<line x1="{x}" y1="{y}" x2="{element.end[0]:.2%}" y2="{element.end[1]:g}" style="{style}"/>'


def _css(color: str) -> str:
    return "currentColor" if color == "ink" else f"var(--{color})"
