"""A laid-out sheet as one SVG file: text as text, pictures inside it, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from xml.sax.saxutils import escape, quoteattr

from opal_deploy.explain.legend import PAPER
from opal_deploy.explain.overlay import as_jpeg
from opal_deploy.explain.palette import css
from opal_deploy.explain.sheet.drawing import Drawing, Element, Picture, Rect, Text, text_width
from opal_deploy.explain.text import visible

_FONTS = "Aileron, Helvetica, Arial, 'Liberation Sans', sans-serif"


def encode_svg(drawing: Drawing) -> bytes:
    """The drawing as an SVG file, UTF-8. Every text is escaped; the same drawing gives the same bytes."""
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width}" height="{drawing.height}" '
        f'viewBox="0 0 {drawing.width} {drawing.height}" role="img" aria-labelledby="title desc" '
        f'font-family="{_FONTS}">\n'
        f'<title id="title">{_text(drawing.title)}</title>\n<desc id="desc">{_text(drawing.description)}</desc>\n'
        f'<rect width="{drawing.width}" height="{drawing.height}" fill="{css(PAPER)}"/>\n'
    ]
    parts += [_element(element) for element in drawing.elements]
    parts.append("</svg>\n")
    return "".join(parts).encode("utf-8")


def _element(element: Element) -> str:
    if isinstance(element, Rect):
        return _rect(element)
    if isinstance(element, Text):
        return _line(element)
    return _picture(element)


def _rect(rect: Rect) -> str:
    if rect.width <= 0 or rect.height <= 0:
        return ""
    fill = "none" if rect.fill is None else css(rect.fill)
    if rect.edge is None:
        return f'<rect x="{rect.x}" y="{rect.y}" width="{rect.width}" height="{rect.height}" fill="{fill}"/>\n'
    half = rect.line / 2
    return (
        f'<rect x="{rect.x + half}" y="{rect.y + half}" width="{rect.width - rect.line}" '
        f'height="{rect.height - rect.line}" fill="{fill}" stroke="{css(rect.edge)}" stroke-width="{rect.line}"/>\n'
    )


def _line(text: Text) -> str:
    # the reader's font may be wider than ours; what was laid out to fit must fit
    width = text_width(text.text, text.size)
    if not width:
        return ""
    weight = ' font-weight="bold"' if text.strong else ""
    return (
        f'<text x="{text.x}" y="{text.y}" font-size="{text.size}" fill="{css(text.color)}" '
        f'text-anchor="{text.anchor}"{weight} textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">'
        f"{_text(text.text)}</text>\n"
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(as_jpeg(picture.image)).decode("ascii")
    width, height = picture.image.size
    return (
        f'<image x="{picture.x}" y="{picture.y}" width="{width}" height="{height}" role="img" '
        f"aria-label={quoteattr(visible(picture.alt))} "
        f'href="data:image/jpeg;base64,{data}"/>\n'
    )


def _text(text: str) -> str:
    return escape(visible(text))
