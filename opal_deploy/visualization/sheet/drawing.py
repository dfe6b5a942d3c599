"""A laid-out sheet: the bitmaps on it, its shapes at fixed places, and their rendering as PNG or SVG.

The SVG is written by hand: a library would add a dependency to the base install for three elements. Its text stays
text, its bitmaps are embedded, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

from PIL import Image, ImageDraw

from opal_deploy.visualization.boxes import MIN_LETTERS, SlotBox, draw_boxes, emphasize
from opal_deploy.visualization.overlay import crop_box, embed_jpeg
from opal_deploy.visualization.sheet.content import ClassView
from opal_deploy.visualization.style import (
    PAPER,
    RGB,
    escape_unprintable,
    font,
    measure_text,
    to_drawable,
    to_hex,
)

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the image
Rectangle = tuple[int, int, int, int]  # x, y, width, height in pixels of a bitmap on the sheet
Anchor = Literal["start", "middle", "end"]

# patches enlarged at least this much show pixels as squares: smoothing would invent detail
_SQUARES_FROM = 8
_PILLOW_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
# the built-in font has one weight: bold text is drawn twice, this many pixels apart
_BOLD_OFFSET = 0.6
# pixels of bitmaps, and of a PNG, per pixel of the layout, for the screens of phones
SCALE = 2
_SVG_FONTS = "Aileron, Helvetica, Arial, 'Liberation Sans', sans-serif"


def fit_size(size: tuple[int, int], bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the largest (width, height) with the aspect ratio of `size` within `bounds`; at least one pixel each."""
    scale = min(bounds[0] / size[0], bounds[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def draw_class_boxes(
    photograph: Image.Image,
    size: tuple[int, int],
    view: ClassView,
    bounds: tuple[int, int],
    *,
    are_parts: bool = True,
    min_letters: int = MIN_LETTERS,
) -> Image.Image:
    """Return the photograph, scaled to fit `bounds`, with the boxes of one class drawn at that size.

    Args:
        photograph: the whole oriented image, RGB, or its `to_display`.
        size: (width, height) of the whole image.
        are_parts: whether the slots' values are contributions to the cosine, which emphasise boxes.
        min_letters: smallest font size of the slots' numbers, in pixels of `bounds`.
    """
    drawn = enlarge(photograph, bounds)
    slots = sorted(view.slots, key=lambda slot: slot.slot)
    emphases = emphasize([slot.value if are_parts else None for slot in slots])
    boxes = [SlotBox(slot.slot, slot.box, emphasis) for slot, emphasis in zip(slots, emphases, strict=True)]
    draw_boxes(drawn, boxes, (drawn.width / size[0], drawn.height / size[1]), min_letters=SCALE * min_letters)
    return drawn


def enlarge(patch: Image.Image, bounds: tuple[int, int]) -> Image.Image:
    """Return an image scaled to fit `bounds` (width, height), `SCALE` pixels each, with its own aspect ratio."""
    width, height = fit_size(patch.size, bounds)
    size = width * SCALE, height * SCALE
    squares = size[0] >= _SQUARES_FROM * patch.width
    return patch.resize(size, Image.Resampling.NEAREST if squares else Image.Resampling.LANCZOS)


def cut_context(
    photograph: Image.Image, size: tuple[int, int], box: Box, field: Box | None, bounds: tuple[int, int]
) -> Image.Image:
    """Return a cell's effective receptive field, scaled to fit `bounds`; the cell alone if the field is not known.

    Args:
        photograph: the whole oriented image, RGB, or its `to_display`.
        bounds: (width, height), `SCALE` pixels each.
    """
    return enlarge(crop_box(photograph, field or box, size), bounds)


def locate_cell(box: Box, field: Box, size: tuple[int, int]) -> Rectangle:
    """Return the place of a cell, at least 3 x 3 pixels, in a bitmap of `size` that shows its field."""
    across, down = size[0] / (field[2] - field[0]), size[1] / (field[3] - field[1])
    x, y = round((box[0] - field[0]) * across), round((box[1] - field[1]) * down)
    return x, y, max(3, round((box[2] - box[0]) * across)), max(3, round((box[3] - box[1]) * down))


@dataclass(frozen=True)
class Rect:
    """A rectangle with an edge of `line` pixels inside it; None leaves out the fill or the edge."""

    x: int
    y: int
    width: int
    height: int
    fill: RGB | None = None
    edge: RGB | None = None
    line: int = 1


@dataclass(frozen=True)
class Text:
    """One line of text, `size` pixels high; `y` is the baseline, `anchor` the part of the line at `x`."""

    x: int
    y: int
    text: str
    size: int
    color: RGB
    anchor: Anchor = "start"
    bold: bool = False


@dataclass(frozen=True)
class Bitmap:
    """Pixels, `SCALE` per pixel of the sheet; `alt` describes them in words."""

    x: int
    y: int
    image: Image.Image
    alt: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height on the sheet."""
        return self.image.width // SCALE, self.image.height // SCALE


Shape: TypeAlias = Rect | Text | Bitmap


@dataclass(frozen=True)
class Drawing:
    """A laid-out sheet; as PNG it has `SCALE` pixels per pixel of the layout."""

    width: int
    height: int
    shapes: tuple[Shape, ...]


def render_png(drawing: Drawing) -> Image.Image:
    """Return the drawing as pixels, RGB."""
    image = Image.new("RGB", (drawing.width * SCALE, drawing.height * SCALE), PAPER)
    draw = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        match shape:
            case Rect() if shape.width > 0 and shape.height > 0:
                right, bottom = (shape.x + shape.width) * SCALE - 1, (shape.y + shape.height) * SCALE - 1
                corners = (shape.x * SCALE, shape.y * SCALE, right, bottom)
                draw.rectangle(corners, fill=shape.fill, outline=shape.edge, width=shape.line * SCALE)
            case Text():
                x, y, text = shape.x * SCALE, shape.y * SCALE, to_drawable(shape.text)
                for left in (x, x + _BOLD_OFFSET * SCALE) if shape.bold else (x,):
                    anchor = _PILLOW_ANCHORS[shape.anchor]
                    draw.text((left, y), text, shape.color, font(shape.size * SCALE), anchor)
            case Bitmap():
                image.paste(shape.image, (shape.x * SCALE, shape.y * SCALE))
    return image


def encode_png(drawing: Drawing) -> bytes:
    """Return the drawing as a PNG file; equal drawings give equal bytes."""
    buffer = io.BytesIO()
    render_png(drawing).save(buffer, "PNG")
    return buffer.getvalue()


def encode_svg(drawing: Drawing) -> bytes:
    """Return the drawing as an SVG file in UTF-8, with all texts escaped; equal drawings give equal bytes."""
    width, height = drawing.width, drawing.height
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_SVG_FONTS}">',
        f'<rect width="{width}" height="{height}" fill="{to_hex(PAPER)}"/>',
    ]
    for shape in drawing.shapes:
        match shape:
            case Rect() if shape.width > 0 and shape.height > 0:
                lines.append(_rect_element(shape))
            case Text():
                lines += _text_elements(shape)
            case Bitmap():
                lines.append(_image_element(shape))
    return "\n".join([*lines, "</svg>\n"]).encode("utf-8")


def _rect_element(rect: Rect) -> str:
    fill = "none" if rect.fill is None else to_hex(rect.fill)
    x, y, width, height, edge = f"{rect.x}", f"{rect.y}", rect.width, rect.height, ""
    if rect.edge is not None:
        # SVG strokes along the middle of the edge, ours lies inside the rectangle
        x, y = f"{rect.x + rect.line / 2}", f"{rect.y + rect.line / 2}"
        width, height = width - rect.line, height - rect.line
        edge = f' stroke="{to_hex(rect.edge)}" stroke-width="{rect.line}"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"{edge}/>'


def _text_elements(text: Text) -> list[str]:
    # the reader's font may be wider than ours: textLength keeps the laid-out width
    width = measure_text(text.text, text.size)
    if not width:
        return []
    weight = ' font-weight="bold"' if text.bold else ""
    return [
        f'<text x="{text.x}" y="{text.y}" font-size="{text.size}" fill="{to_hex(text.color)}" '
        f'text-anchor="{text.anchor}"{weight} textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">'
        f"{_escape(text.text)}</text>"
    ]


def _image_element(bitmap: Bitmap) -> str:
    width, height = bitmap.size
    return (
        f'<image x="{bitmap.x}" y="{bitmap.y}" width="{width}" height="{height}" role="img" '
        f'aria-label={quoteattr(escape_unprintable(bitmap.alt))} href="{embed_jpeg(bitmap.image)}"/>'
    )


def _escape(text: str) -> str:
    return escape(escape_unprintable(text))
