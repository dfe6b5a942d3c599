"""A laid-out sheet as PNG."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from opal_deploy.explain.legend import PAPER
from opal_deploy.explain.sheet.drawing import Drawing, Picture, Rect, Text
from opal_deploy.explain.text import drawable, font, put_text

_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def draw_png(drawing: Drawing) -> Image.Image:
    """RGB pixels of the drawing."""
    canvas = Image.new("RGB", (drawing.width, drawing.height), PAPER)
    draw = ImageDraw.Draw(canvas)
    for element in drawing.elements:
        if isinstance(element, Picture):
            canvas.paste(element.image, (element.x, element.y))
        elif isinstance(element, Rect):
            if element.width > 0 and element.height > 0:
                corners = (
                    element.x, element.y, element.x + element.width - 1, element.y + element.height - 1,
                )  # fmt: skip
                draw.rectangle(corners, fill=element.fill, outline=element.edge, width=element.line)
        else:
            _put(draw, element)
    return canvas


def encode_png(drawing: Drawing) -> bytes:
    """The drawing as a PNG file, with its title and description; the same drawing gives the same bytes."""
    about = PngInfo()
    about.add_itxt("Title", drawing.title)
    about.add_itxt("Description", drawing.description)
    buffer = io.BytesIO()
    draw_png(drawing).save(buffer, "PNG", pnginfo=about)
    return buffer.getvalue()


def _put(draw: ImageDraw.ImageDraw, text: Text) -> None:
    words = drawable(text.text)
    put_text(draw, (text.x, text.y), words, text.color, font(text.size), _ANCHORS[text.anchor])
    if text.strong:
        # the built-in font has one weight
        put_text(draw, (text.x + 0.6, text.y), words, text.color, font(text.size), _ANCHORS[text.anchor])
