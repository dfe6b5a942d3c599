"""Text from outside (labels, file names, messages), made fit to be drawn in Pillow's built-in font or put on a page."""

from __future__ import annotations

import math
import threading
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import cast

from PIL import Image, ImageDraw, ImageFont

# letters and signs that Unicode does not decompose to what the built-in font has
_PLAIN = str.maketrans(
    {
        "ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d",
        "Đ": "D", "ð": "d", "þ": "th", "Þ": "Th", "ı": "i", "‘": "'", "’": "'", "‐": "-", "–": "-", "—": "-",
        "−": "-", "×": "x",
    }
)  # fmt: skip
_JOINERS = "\u200c\u200d"  # unprintable to Python, but part of Persian and Indic spelling
# characters of a text from outside that are looked at before it is wrapped or truncated
_MAX_CHARACTERS = 2000

_local = threading.local()


def font(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's built-in font at `size` pixels: one object per thread, since FreeType faces are not shareable."""
    fonts: dict[int, ImageFont.FreeTypeFont] | None = getattr(_local, "fonts", None)
    if fonts is None or len(fonts) > 64:
        fonts = _local.fonts = {}
    if size not in fonts:
        fonts[size] = cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))
    return fonts[size]


def draw_text(
    draw: ImageDraw.ImageDraw,
    xy: tuple[float, float],
    text: str,
    fill: tuple[int, int, int],
    face: ImageFont.FreeTypeFont,
    anchor: str = "la",
) -> None:
    """Draw text as `draw.text` does, pixel for pixel, at a fraction of the time: the masks of words are cached.

    Args:
        draw: the canvas.
        xy: where the anchor is, in pixels; fractions count.
        text: what `to_drawable` returns.
        fill: the colour, RGB.
        face: a face of `font`.
        anchor: one of Pillow's text anchors.
    """
    (x, left), (y, top) = math.modf(xy[0]), math.modf(xy[1])
    for word in text.split(" ") if anchor[0] == "l" else [text]:
        if word:
            (right, down), mask = _word_mask(word, face.size, anchor, x, y)
            draw.bitmap((int(left) + right, int(top) + down), mask, fill)
        left += text_length(word + " ", face)


def text_length(text: str, face: ImageFont.FreeTypeFont) -> float:
    """Return `face.getlength(text)` for a face of `font`, from cached words: none depends on the one before."""
    words = text.split(" ")
    return sum(_word_length(word, face.size) for word in words if word) + (len(words) - 1) * _word_length(
        " ", face.size
    )


def measure_text(text: str, size: int) -> float:
    """Return the pixels that any text takes at `size`; letters that the font lacks count as other fonts draw them."""
    if text.isascii():
        return text_length(text, font(size))
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    narrow = "".join(c for c in text if unicodedata.east_asian_width(c) not in "WF")
    return text_length(to_drawable(narrow, len(narrow)), font(size)) + wide * size


@lru_cache(maxsize=8192)
def _word_mask(text: str, size: float, anchor: str, x: float, y: float) -> tuple[tuple[int, int], Image.Image]:
    """Return a word's offset and its coverage of each pixel, drawn at the fraction (x, y) of a pixel."""
    core, (right, down) = font(round(size)).getmask2(text, "L", anchor=anchor, start=(x, y))
    return (int(right), int(down)), Image.frombytes("L", core.size, bytes(core))


@lru_cache(maxsize=8192)
def _word_length(text: str, size: float) -> float:
    return font(round(size)).getlength(text)


def escape_unprintable(text: str) -> str:
    """Return `text` with what does not print (line ends, controls, direction marks, lone surrogates) as \\x0a."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _JOINERS else c.encode("unicode_escape").decode() for c in text)


def to_drawable(text: str, limit: int = 300) -> str:
    """Return one line of at most `limit` characters that the built-in font has; unknown letters become `?`."""
    text = " ".join(text[: 4 * limit].split())[:limit]
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_drawable_character, unicodedata.normalize("NFC", text)))


@lru_cache(maxsize=4096)
def _drawable_character(character: str) -> str:
    if _has_glyph(character):
        return character
    # compatibility forms first (ligatures, full-width letters), then base letters without their marks
    parts = unicodedata.normalize("NFKD", character).translate(_PLAIN)
    kept = "".join(c for c in parts if not unicodedata.combining(c))
    if kept and all(_has_glyph(c) for c in kept):
        return kept
    return "" if unicodedata.combining(character) or character in _JOINERS else "?"


def _has_glyph(character: str) -> bool:
    if not character.isprintable():
        return False
    # a code point that can have no glyph draws the box that stands for any missing one
    face = font(16)
    return character == " " or bytes(face.getmask(character)) != bytes(face.getmask("\uffff"))


def wrap_text(text: str, face: ImageFont.FreeTypeFont, width: float, lines: int = 1) -> list[str]:
    """Return drawable text broken at spaces into at most `lines` lines of `width` pixels; the rest is an ellipsis."""
    return _wrap(text, width, lines, lambda part: text_length(part, face), text_length("…", face))


def wrap_lines(text: str, size: int, width: float, lines: int = 1) -> list[str]:
    """Return any text broken at spaces into at most `lines` lines of `width` pixels; the rest is an ellipsis."""
    text = " ".join(escape_unprintable(text[:_MAX_CHARACTERS]).split())
    return _wrap(text, width, lines, lambda part: measure_text(part, size), measure_text("...", size))


def fit_line(text: str, size: int, width: float) -> str:
    """Return any text on one line of `width` pixels, the end replaced by an ellipsis where it is too long."""
    return "".join(wrap_lines(text, size, width))


def truncate_middle(text: str, size: int, width: float) -> str:
    """Return any text on one line of `width` pixels without its middle where it is too long, as file names need."""
    whole = " ".join(escape_unprintable(text[-_MAX_CHARACTERS:]).split())

    def measure(part: str) -> float:
        return measure_text(part, size)

    if measure(whole) <= width:
        return whole
    available = width - measure("...")
    reverse = whole[::-1]
    end = reverse[: _count_fitting(reverse, 0.7 * available, measure)][::-1]
    start = whole[: _count_fitting(whole, available - measure(end), measure)]
    return f"{start}…{end}"


def _wrap(text: str, width: float, lines: int, measure: Callable[[str], float], ellipsis: float) -> list[str]:
    rest = text
    out: list[str] = []
    while rest and len(out) < lines:
        if measure(rest) <= width:
            return [*out, rest]
        if len(out) == lines - 1:
            count = _count_fitting(rest, width - ellipsis, measure)
            return [*out, rest[:count].rstrip() + "…"]
        count = _count_fitting(rest, width, measure)
        space = rest.rfind(" ", 1, count + 1)
        cut = space if space > 0 else max(count, 1)
        out.append(rest[:cut])
        rest = rest[cut:].lstrip()
    return out


def _count_fitting(text: str, width: float, measure: Callable[[str], float]) -> int:
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if measure(text[:middle]) <= width else (low, middle - 1)
    return low
