"""Charts as files of their own: SVG, or PNG drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.bench.report.drawing import (
    MARKERS,
    Bar,
    Chart,
    Element,
    Line,
    Marker,
    Text,
    colors,
    css_colors,
    marker_definitions,
    series_color,
    to_svg,
)
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

Point = tuple[float, float]

_SUFFIXES = (".svg", ".png")
_WIDTH, _MARGIN = 880, 20
_FONT_SIZE = 13
# pixels of a PNG for each pixel of the drawing
_SCALE = 2


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
    elements, height = _stack(charts, heading)
    try:
        if path.suffix.lower() == ".png":
            _rasterize(elements, height).save(path)
        else:
            path.write_text(_to_document(elements, height), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--chart {path}: cannot be written ({error.strerror or error}); choose another") from None


def _stack(charts: Sequence[Chart], heading: str) -> tuple[list[Element], float]:
    """Return everything that a file shows, and its height: a heading, then title, drawing, legend and note of each."""
    elements: list[Element] = [Text((0, 18), heading)]
    y = 34.0
    for chart in charts:
        y += 32
        elements.append(Text((0, y - 4), chart.title, color="soft"))
        elements += [_shift(element, y + 4) for element in chart.elements]
        y += chart.height + 4
        for index, key in enumerate(chart.legend):
            x = 0.02 + 0.5 * (index % 2)
            elements += [key.symbol(x, y + 10, 12 / _WIDTH), Text((x + 0.015, y + 14), key.label)]
            y += 20 if index % 2 or index == len(chart.legend) - 1 else 0
        if chart.note:
            y += 22
            elements.append(Text((0, y - 4), chart.note, color="soft"))
    return elements, y + 8


def _shift(element: Element, dy: float) -> Element:
    moved = replace(element, start=(element.start[0], element.start[1] + dy))
    return replace(moved, end=(moved.end[0], moved.end[1] + dy)) if isinstance(moved, Line | Bar) else moved


def _to_document(elements: Sequence[Element], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _MARGIN}" height="{height + 2 * _MARGIN:g}">'
        f"<style>:root {{ {css_colors(dark=False)} }} @media (prefers-color-scheme: dark) {{ :root {{ "
        f"{css_colors(dark=True)} }} }} svg {{ color: var(--ink); font: {_FONT_SIZE}px system-ui, sans-serif; "
        f"overflow: visible }}</style><defs>{marker_definitions()}</defs>"
        f'<rect width="100%" height="100%" style="fill: var(--card)"/>'
        f'<svg x="{_MARGIN}" y="{_MARGIN}" width="{_WIDTH}" height="{height:g}">{to_svg(elements)}</svg></svg>\n'
    )


def _rasterize(elements: Sequence[Element], height: float) -> Image:
    from PIL import Image, ImageColor, ImageDraw, ImageFont

    palette = {name: ImageColor.getrgb(color) for name, color in colors(dark=False).items()}
    size = ((_WIDTH + 2 * _MARGIN) * _SCALE, round((height + 2 * _MARGIN) * _SCALE))
    image = Image.new("RGB", size, palette["card"])
    # mode RGBA blends what is drawn with what is there
    draw = ImageDraw.Draw(image, "RGBA")
    font = ImageFont.load_default(_FONT_SIZE * _SCALE)

    def to_pixels(point: Point) -> Point:
        return (point[0] * _WIDTH + _MARGIN) * _SCALE, (point[1] + _MARGIN) * _SCALE

    for element in elements:
        x, y = to_pixels(element.start)
        if isinstance(element, Text):
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[element.anchor]
            draw.text((x, y), element.text, fill=palette[element.color], font=font, anchor=anchor)
        elif isinstance(element, Marker):
            color = palette[series_color(element.series)]
            shape = [(x + dx * _SCALE, y + dy * _SCALE) for dx, dy in MARKERS[element.series % len(MARKERS)]]
            draw.polygon(shape, fill=palette["card"] if element.hollow else color, outline=color, width=_SCALE)
        elif isinstance(element, Bar):
            fill = (*palette[element.color][:3], round(255 * element.opacity))
            draw.rectangle([(x, y), to_pixels(element.end)], fill=fill)
        else:
            for start, end in _split_dashes((x, y), to_pixels(element.end), element.dash):
                draw.line([start, end], fill=palette[element.color], width=round(element.width * _SCALE))
    return image


def _split_dashes(start: Point, end: Point, dash: Sequence[int]) -> Iterator[tuple[Point, Point]]:
    length = math.dist(start, end)
    if not dash or not length:
        yield start, end
        return
    position, step = 0.0, 0
    while position < length:
        reach = min(length, position + dash[step % len(dash)] * _SCALE)
        if step % 2 == 0:
            first, last = (
                (start[0] + (end[0] - start[0]) * at / length, start[1] + (end[1] - start[1]) * at / length)
                for at in (position, reach)
            )
            yield first, last
        position, step = reach, step + 1
