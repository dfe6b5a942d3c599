"""What a laid-out sheet consists of, for any renderer: rectangles, lines of text, pictures, at fixed places.

A laid-out sheet as PNG.

A laid-out sheet as one SVG file: text as text, pictures inside it, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import io
import unicodedata
from dataclasses import dataclass
from typing import Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from opal_deploy.visualization.legend import PAPER
from opal_deploy.visualization.overlay import encode_jpeg
from opal_deploy.visualization.palette import RGB, to_hex
from opal_deploy.visualization.text import draw_text, escape_unprintable, font, text_length, to_drawable

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Rect:
    """A rectangle; without `fill` only its edge, which is `line` wide and lies inside it."""

    x: int
    y: int
    width: int
    height: int
    fill: RGB | None = None
    edge: RGB | None = None
    line: int = 1


@dataclass(frozen=True)
class Text:
    """One line of text: `x` as `anchor` says, `y` of the baseline, `size` in pixels."""

    x: int
    y: int
    text: str
    size: int
    color: RGB
    anchor: Anchor = "start"
    strong: bool = False


@dataclass(frozen=True)
class Bitmap:
    """Pixels at a place, in the size that they have; `alt` says in words what they show."""

    x: int
    y: int
    image: Image.Image
    alt: str


Element: TypeAlias = Rect | Text | Bitmap


@dataclass(frozen=True)
class Drawing:
    """A sheet, laid out.

    Attributes:
        width, height: in pixels. title, description: in words, for those who do not see it.
        elements: later ones lie over earlier ones.
    """

    width: int
    height: int
    title: str
    description: str
    elements: tuple[Element, ...]


def text_width(text: str, size: int) -> float:
    """Pixels that a line takes; letters that the built-in font lacks count as other fonts draw them."""
    if text.isascii():
        return text_length(text, font(size))
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    narrow = "".join(c for c in text if unicodedata.east_asian_width(c) not in "WF")
    return text_length(to_drawable(narrow, len(narrow)), font(size)) + wide * size


def wrap_lines(text: str, size: int, width: float, lines: int = 1) -> list[str]:
    """`text` (from anywhere) on at most `lines` lines of `width` pixels, broken at spaces; the rest is an ellipsis."""
    rest = " ".join(escape_unprintable(text[:2000]).split())
    out: list[str] = []
    while rest and len(out) < lines:
        if text_width(rest, size) <= width:
            return [*out, rest]
        if len(out) == lines - 1:
            count = _that_fit(rest, size, width - text_width("...", size))
            return [*out, rest[:count].rstrip() + "…"]
        count = _that_fit(rest, size, width)
        space = rest.rfind(" ", 1, count + 1)
        cut = space if space > 0 else max(count, 1)
        out.append(rest[:cut])
        rest = rest[cut:].lstrip()
    return out


def fit_line(text: str, size: int, width: float) -> str:
    """`lines_of` with one line."""
    return "".join(wrap_lines(text, size, width))


def truncate_middle(text: str, size: int, width: float) -> str:
    """One line of which the middle goes where it is too long: a file's name is told by its end."""
    whole = " ".join(escape_unprintable(text[-2000:]).split())
    if text_width(whole, size) <= width:
        return whole
    room = width - text_width("...", size)
    reverse = whole[::-1]
    end = reverse[: _that_fit(reverse, size, 0.7 * room)][::-1]
    start = whole[: _that_fit(whole, size, room - text_width(end, size))]
    return f"{start}…{end}"


def _that_fit(text: str, size: int, width: float) -> int:
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text_width(text[:middle], size) <= width else (low, middle - 1)
    return low


_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def render_png(drawing: Drawing) -> Image.Image:
    """RGB pixels of the drawing."""
    canvas = Image.new("RGB", (drawing.width, drawing.height), PAPER)
    draw = ImageDraw.Draw(canvas)
    for element in drawing.elements:
        if isinstance(element, Bitmap):
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
    render_png(drawing).save(buffer, "PNG", pnginfo=about)
    return buffer.getvalue()


def _put(draw: ImageDraw.ImageDraw, text: Text) -> None:
    words = to_drawable(text.text)
    draw_text(draw, (text.x, text.y), words, text.color, font(text.size), _ANCHORS[text.anchor])
    if text.strong:
        # the built-in font has one weight
        draw_text(draw, (text.x + 0.6, text.y), words, text.color, font(text.size), _ANCHORS[text.anchor])


_FONTS = "Aileron, Helvetica, Arial, 'Liberation Sans', sans-serif"


def encode_svg(drawing: Drawing) -> bytes:
    """The drawing as an SVG file, UTF-8. Every text is escaped; the same drawing gives the same bytes."""
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width}" height="{drawing.height}" '
        f'viewBox="0 0 {drawing.width} {drawing.height}" role="img" aria-labelledby="title desc" '
        f'font-family="{_FONTS}">\n'
        f'<title id="title">{_text(drawing.title)}</title>\n<desc id="desc">{_text(drawing.description)}</desc>\n'
        f'<rect width="{drawing.width}" height="{drawing.height}" fill="{to_hex(PAPER)}"/>\n'
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
    fill = "none" if rect.fill is None else to_hex(rect.fill)
    if rect.edge is None:
        return f'<rect x="{rect.x}" y="{rect.y}" width="{rect.width}" height="{rect.height}" fill="{fill}"/>\n'
    half = rect.line / 2
    return (
        f'<rect x="{rect.x + half}" y="{rect.y + half}" width="{rect.width - rect.line}" '
        f'height="{rect.height - rect.line}" fill="{fill}" stroke="{to_hex(rect.edge)}" stroke-width="{rect.line}"/>\n'
    )


def _line(text: Text) -> str:
    # the reader's font may be wider than ours; what was laid out to fit must fit
    width = text_width(text.text, text.size)
    if not width:
        return ""
    weight = ' font-weight="bold"' if text.strong else ""
    return (
        f'<text x="{text.x}" y="{text.y}" font-size="{text.size}" fill="{to_hex(text.color)}" '
        f'text-anchor="{text.anchor}"{weight} textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">'
        f"{_text(text.text)}</text>\n"
    )


def _picture(picture: Bitmap) -> str:
    data = base64.b64encode(encode_jpeg(picture.image)).decode("ascii")
    width, height = picture.image.size
    return (
        f'<image x="{picture.x}" y="{picture.y}" width="{width}" height="{height}" role="img" '
        f"aria-label={quoteattr(escape_unprintable(picture.alt))} "
        f'href="data:image/jpeg;base64,{data}"/>\n'
    )


def _text(text: str) -> str:
    return escape(escape_unprintable(text))
