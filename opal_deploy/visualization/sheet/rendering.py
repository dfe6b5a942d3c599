"""A laid-out sheet as a file: one drawing of shapes, rendered in one traversal to PNG (Pillow) or SVG (text).

The shapes are rectangles, lines of text and bitmaps at fixed places. The SVG is written by hand: a library would bring
a dependency to the base install for three elements. Its text stays text, its bitmaps are inside the file, and nothing
is loaded from elsewhere.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias
from xml.sax.saxutils import escape, quoteattr

from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from opal_deploy.visualization.legend import PAPER
from opal_deploy.visualization.overlay import encode_jpeg
from opal_deploy.visualization.palette import RGB, to_hex
from opal_deploy.visualization.text import draw_text, escape_unprintable, font, measure_text, to_drawable

Anchor = Literal["start", "middle", "end"]

_PILLOW_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
# the built-in font has one weight: bold text is drawn twice, this many pixels apart
_BOLD_OFFSET = 0.6
_SVG_FONTS = "Aileron, Helvetica, Arial, 'Liberation Sans', sans-serif"


@dataclass(frozen=True)
class Rect:
    """A rectangle of `fill` with an edge of `line` pixels inside it; None leaves out the fill or the edge."""

    x: int
    y: int
    width: int
    height: int
    fill: RGB | None = None
    edge: RGB | None = None
    line: int = 1


@dataclass(frozen=True)
class Text:
    """One line of text of `size` pixels: `y` is the baseline, and `anchor` tells where in the line `x` is."""

    x: int
    y: int
    text: str
    size: int
    color: RGB
    anchor: Anchor = "start"
    bold: bool = False


@dataclass(frozen=True)
class Bitmap:
    """Pixels at a place, in their own size; `alt` says in words what they show."""

    x: int
    y: int
    image: Image.Image
    alt: str


Shape: TypeAlias = Rect | Text | Bitmap


@dataclass(frozen=True)
class Drawing:
    """A laid-out sheet.

    Attributes:
        width: in pixels.
        height: in pixels.
        title: the sheet's name, for those who do not see it.
        description: the sheet in words, for those who do not see it.
        shapes: later ones lie over earlier ones.
    """

    width: int
    height: int
    title: str
    description: str
    shapes: tuple[Shape, ...]


class Canvas(Protocol):
    """A backend that draws shapes."""

    def draw_rect(self, rect: Rect) -> None:
        """Draw a rectangle of at least one pixel."""
        ...

    def draw_text(self, text: Text) -> None:
        """Draw a line of text."""
        ...

    def draw_bitmap(self, bitmap: Bitmap) -> None:
        """Draw a bitmap."""
        ...


def render(drawing: Drawing, canvas: Canvas) -> None:
    """Draw every shape of a drawing in order."""
    for shape in drawing.shapes:
        match shape:
            case Rect():
                if shape.width > 0 and shape.height > 0:
                    canvas.draw_rect(shape)
            case Text():
                canvas.draw_text(shape)
            case Bitmap():
                canvas.draw_bitmap(shape)


def render_png(drawing: Drawing) -> Image.Image:
    """Return the drawing as pixels, RGB."""
    canvas = _PngCanvas(drawing)
    render(drawing, canvas)
    return canvas.image


def encode_png(drawing: Drawing) -> bytes:
    """Return the drawing as a PNG file with its title and description; the same drawing gives the same bytes."""
    about = PngInfo()
    about.add_itxt("Title", drawing.title)
    about.add_itxt("Description", drawing.description)
    buffer = io.BytesIO()
    render_png(drawing).save(buffer, "PNG", pnginfo=about)
    return buffer.getvalue()


def encode_svg(drawing: Drawing) -> bytes:
    """Return the drawing as an SVG file in UTF-8, every text escaped; the same drawing gives the same bytes."""
    canvas = _SvgCanvas(drawing)
    render(drawing, canvas)
    return canvas.encode()


class _PngCanvas:
    """Pixels, drawn with Pillow."""

    def __init__(self, drawing: Drawing) -> None:
        self.image = Image.new("RGB", (drawing.width, drawing.height), PAPER)
        self._draw = ImageDraw.Draw(self.image)

    def draw_rect(self, rect: Rect) -> None:
        corners = (rect.x, rect.y, rect.x + rect.width - 1, rect.y + rect.height - 1)
        self._draw.rectangle(corners, fill=rect.fill, outline=rect.edge, width=rect.line)

    def draw_text(self, text: Text) -> None:
        words, face, anchor = to_drawable(text.text), font(text.size), _PILLOW_ANCHORS[text.anchor]
        draw_text(self._draw, (text.x, text.y), words, text.color, face, anchor)
        if text.bold:
            draw_text(self._draw, (text.x + _BOLD_OFFSET, text.y), words, text.color, face, anchor)

    def draw_bitmap(self, bitmap: Bitmap) -> None:
        self.image.paste(bitmap.image, (bitmap.x, bitmap.y))


class _SvgCanvas:
    """SVG elements, one a line."""

    def __init__(self, drawing: Drawing) -> None:
        width, height = drawing.width, drawing.height
        self._lines = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title desc" font-family="{_SVG_FONTS}">',
            f'<title id="title">{_escape(drawing.title)}</title>',
            f'<desc id="desc">{_escape(drawing.description)}</desc>',
            f'<rect width="{width}" height="{height}" fill="{to_hex(PAPER)}"/>',
        ]

    def draw_rect(self, rect: Rect) -> None:
        fill = "none" if rect.fill is None else to_hex(rect.fill)
        x, y, width, height, edge = f"{rect.x}", f"{rect.y}", rect.width, rect.height, ""
        if rect.edge is not None:
            # SVG strokes along the middle of the edge, and ours lies inside the rectangle
            x, y = f"{rect.x + rect.line / 2}", f"{rect.y + rect.line / 2}"
            width, height = width - rect.line, height - rect.line
            edge = f' stroke="{to_hex(rect.edge)}" stroke-width="{rect.line}"'
        self._lines.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"{edge}/>')

    def draw_text(self, text: Text) -> None:
        # the reader's font may be wider than ours: the length makes it as wide as it was laid out
        width = measure_text(text.text, text.size)
        if not width:
            return
        weight = ' font-weight="bold"' if text.bold else ""
        self._lines.append(
            f'<text x="{text.x}" y="{text.y}" font-size="{text.size}" fill="{to_hex(text.color)}" '
            f'text-anchor="{text.anchor}"{weight} textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">'
            f"{_escape(text.text)}</text>"
        )

    def draw_bitmap(self, bitmap: Bitmap) -> None:
        data = base64.b64encode(encode_jpeg(bitmap.image)).decode("ascii")
        width, height = bitmap.image.size
        self._lines.append(
            f'<image x="{bitmap.x}" y="{bitmap.y}" width="{width}" height="{height}" role="img" '
            f"aria-label={quoteattr(escape_unprintable(bitmap.alt))} "
            f'href="data:image/jpeg;base64,{data}"/>'
        )

    def encode(self) -> bytes:
        return "\n".join([*self._lines, "</svg>\n"]).encode("utf-8")


def _escape(text: str) -> str:
    return escape(escape_unprintable(text))
