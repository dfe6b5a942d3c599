"""Text from outside (labels, file names, messages), made fit to be drawn or to be put on a page."""

from __future__ import annotations

import math
import threading
import unicodedata
from functools import lru_cache
from typing import cast

from PIL import Image, ImageDraw, ImageFont

# letters and signs that Unicode does not decompose to what Pillow's built-in font has
_PLAIN = str.maketrans(
    {
        "ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d",
        "Đ": "D", "ð": "d", "þ": "th", "Þ": "Th", "ı": "i", "‘": "'", "’": "'", "‐": "-", "–": "-", "—": "-",
        "−": "-", "×": "x",
    }
)  # fmt: skip
_JOINERS = "\u200c\u200d"  # unprintable to Python, but part of Persian and Indic spelling

_local = threading.local()


def font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's built-in font at `size` pixels; one object a thread and size, since FreeType faces are not shareable."""
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
    """`draw.text` in one of `font`'s faces, pixel for pixel, at a fraction of the time.

    Words once drawn are kept: a run draws the same words and numbers all the time.
    """
    (x, left), (y, top) = math.modf(xy[0]), math.modf(xy[1])
    for word in text.split(" ") if anchor[0] == "l" else [text]:
        if word:
            (right, down), mask = _word_mask(word, face.size, anchor, x, y)
            draw.bitmap((int(left) + right, int(top) + down), mask, fill)
        left += text_length(word + " ", face)


def text_length(text: str, face: ImageFont.FreeTypeFont) -> float:
    """`face.getlength` of one of `font`'s faces: no word depends on the one before it."""
    words = text.split(" ")
    return sum(_length(word, face.size) for word in words if word) + (len(words) - 1) * _length(" ", face.size)


@lru_cache(maxsize=8192)
def _word_mask(text: str, size: float, anchor: str, x: float, y: float) -> tuple[tuple[int, int], Image.Image]:
    """How much of each pixel a text covers that is drawn at the fraction (x, y) of a pixel, and where that begins."""
    core, (right, down) = font(round(size)).getmask2(text, "L", anchor=anchor, start=(x, y))
    return (int(right), int(down)), Image.frombytes("L", core.size, bytes(core))


@lru_cache(maxsize=8192)
def _length(text: str, size: float) -> float:
    return font(round(size)).getlength(text)


def escape_unprintable(text: str) -> str:
    """`text` with everything that does not print (line ends, controls, direction marks, lone surrogates) as \\x0a."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _JOINERS else c.encode("unicode_escape").decode() for c in text)


def to_drawable(text: str, limit: int = 300) -> str:
    """One line of at most `limit` characters that the built-in font can draw; accents go, other letters become `?`."""
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
    """`text` broken at spaces into at most `lines` lines of `width` pixels; what does not fit ends in an ellipsis."""
    rest = text
    out: list[str] = []
    while rest and len(out) < lines:
        if text_length(rest, face) <= width:
            return [*out, rest]
        count = _count_fitting(rest, face, width)
        if len(out) == lines - 1:
            count = _count_fitting(rest, face, width - text_length("…", face))
            return [*out, rest[:count].rstrip() + "…"]
        space = rest.rfind(" ", 1, count + 1)
        cut = space if space > 0 else max(count, 1)
        out.append(rest[:cut])
        rest = rest[cut:].lstrip()
    return out


def _count_fitting(text: str, face: ImageFont.FreeTypeFont, width: float) -> int:
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if face.getlength(text[:middle]) <= width else (low, middle - 1)
    return low
