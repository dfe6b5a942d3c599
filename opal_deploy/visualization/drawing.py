"""A picture of bitmaps, rectangles and lines of text at fixed places, written as PNG or SVG.

The SVG is written by hand: a library would add a dependency to the base install for three elements. Its text stays
text, its bitmaps are embedded, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

from PIL import Image, ImageDraw

from opal_deploy.visualization.overlay import embed_jpeg
from opal_deploy.visualization.style import INK, PAPER, RGB, escape_unprintable, font, measure_text, to_drawable, to_hex

Anchor = Literal["start", "middle", "end"]
# pixels of bitmaps, and of a PNG, per pixel of the layout, for the screens of phones
SCALE = 2
_PILLOW_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
# the built-in font has one weight: bold text is drawn twice, this many pixels apart
_BOLD_OFFSET = 0.6
_SVG_FONTS = "Aileron, Helvetica, Arial, 'Liberation Sans', sans-serif"


@dataclass(frozen=True)
class Rect:
    """A rectangle with an edge of one pixel inside it; None leaves out the fill or the edge."""

    x: int
    y: int
    width: int
    height: int
    fill: RGB | None = None
    edge: RGB | None = None


@dataclass(frozen=True)
class Text:
    """One line of text, `size` pixels high; `y` is the baseline, `anchor` the part of the line at `x`."""

    x: int
    y: int
    text: str
    size: int
    color: RGB = INK
    anchor: Anchor = "start"
    bold: bool = False


@dataclass(frozen=True)
class Bitmap:
    """Pixels, `SCALE` per pixel of the layout; `alt` describes them in words."""

    x: int
    y: int
    image: Image.Image
    alt: str


Shape: TypeAlias = Rect | Text | Bitmap


@dataclass
class Drawing:
    """Shapes in the order in which they are drawn, on paper of a width and height; equal ones give equal files."""

    width: int
    height: int
    shapes: list[Shape] = field(default_factory=list)

    def encode(self, file_format: str) -> bytes:
        """Return the drawing as a `png` or `svg` file."""
        if file_format == "svg":
            return self._to_svg().encode()
        buffer = io.BytesIO()
        self.to_image().save(buffer, "PNG")
        return buffer.getvalue()

    def to_image(self) -> Image.Image:
        """Return the drawing as pixels, RGB."""
        image = Image.new("RGB", (self.width * SCALE, self.height * SCALE), PAPER)
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            x, y = shape.x * SCALE, shape.y * SCALE
            match shape:
                case Rect() if shape.width > 0 and shape.height > 0:
                    corners = (x, y, x + shape.width * SCALE - 1, y + shape.height * SCALE - 1)
                    draw.rectangle(corners, fill=shape.fill, outline=shape.edge, width=SCALE)
                case Text():
                    for left in (x, x + _BOLD_OFFSET * SCALE) if shape.bold else (x,):
                        anchor = _PILLOW_ANCHORS[shape.anchor]
                        draw.text((left, y), to_drawable(shape.text), shape.color, font(shape.size * SCALE), anchor)
                case Bitmap():
                    image.paste(shape.image, (x, y))
        return image

    def _to_svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        elements = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {self.height}" '
            f'font-family="{_SVG_FONTS}">',
            f'<rect {size} fill="{to_hex(PAPER)}"/>',
            *filter(None, map(_to_element, self.shapes)),
        ]
        return "\n".join([*elements, "</svg>\n"])


def _to_element(shape: Shape) -> str:
    match shape:
        case Rect() if shape.width > 0 and shape.height > 0:
            # SVG strokes along the middle of the edge, ours lies inside the rectangle
            inset = 0 if shape.edge is None else 1
            edge = "" if shape.edge is None else f' stroke="{to_hex(shape.edge)}" stroke-width="1"'
            fill = "none" if shape.fill is None else to_hex(shape.fill)
            corner = f'x="{shape.x + inset / 2:g}" y="{shape.y + inset / 2:g}"'
            return f'<rect {corner} width="{shape.width - inset}" height="{shape.height - inset}" fill="{fill}"{edge}/>'
        case Text() if length := measure_text(shape.text, shape.size):
            weight = ' font-weight="bold"' if shape.bold else ""
            # the reader's font may be wider than ours: textLength keeps the laid-out width
            return (
                f'<text x="{shape.x}" y="{shape.y}" font-size="{shape.size}" fill="{to_hex(shape.color)}" '
                f'text-anchor="{shape.anchor}"{weight} textLength="{length:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(escape_unprintable(shape.text))}</text>'
            )
        case Bitmap():
            return (
                f'<image x="{shape.x}" y="{shape.y}" width="{shape.image.width // SCALE}" '
                f'height="{shape.image.height // SCALE}" role="img" '
                f'aria-label={quoteattr(escape_unprintable(shape.alt))} href="{embed_jpeg(shape.image)}"/>'
            )
    return ""
