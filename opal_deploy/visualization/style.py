"""Colours, numbers and text of drawings and pages.

Slots have ten colours that readers with and without colour-vision deficiencies can tell apart; from slot 10 on they
repeat. Text from outside (labels, file names, messages) is made printable here, or drawable in Pillow's built-in font.
"""

from __future__ import annotations

import bisect
import threading
import unicodedata
from functools import lru_cache
from typing import cast

from PIL import ImageFont

RGB = tuple[int, int, int]

WHITE: RGB = (255, 255, 255)
BLACK: RGB = (0, 0, 0)
PAPER: RGB = (250, 250, 248)
INK: RGB = (26, 26, 26)
FAINT: RGB = (86, 86, 86)
TRACK: RGB = (226, 226, 222)
ALERT: RGB = (150, 40, 27)

# Found by a search for ten colours that stay apart as far as possible for normal vision, protanopia, deuteranopia and
# tritanopia (Machado, Oliveira & Fernandes 2009): at least 27 in CIE76, the first five 32. Published sets reach 17
# (Petroff 2021, ten colours) and 16 (Okabe & Ito 2008, eight). The first few, enough for most models, also differ in
# name.
COLORS: tuple[RGB, ...] = (
    (41, 37, 215),  # blue
    (253, 227, 53),  # yellow
    (249, 55, 7),  # red
    (208, 110, 255),  # violet
    (104, 240, 184),  # mint
    (95, 62, 71),  # plum
    (69, 133, 150),  # teal
    (189, 202, 229),  # pale blue
    (152, 0, 14),  # dark red
    (136, 137, 110),  # olive
)

# labels of an image whose evidence is shown, the strongest first
LABELS_SHOWN = 6
# letters and signs that Unicode does not decompose to what the built-in font has
_PLAIN = str.maketrans(
    {
        "ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d",
        "Đ": "D", "ð": "d", "þ": "th", "Þ": "Th", "ı": "i", "‘": "'", "’": "'", "‐": "-", "–": "-", "—": "-",
        "−": "-", "×": "x",
    }
)  # fmt: skip
_JOINERS = "\u200c\u200d"  # unprintable to Python, but part of Persian and Indic spelling
# characters read of a text from outside before it is wrapped or truncated
_MAX_CHARACTERS = 2000


def slot_color(slot: int) -> RGB:
    """Return the colour of a slot (0, 1, ...)."""
    return COLORS[slot % len(COLORS)]


@lru_cache(maxsize=1024)
def text_color(background: RGB) -> RGB:
    """Return white or black, whichever contrasts more with `background` (at least 4.5:1, WCAG AA)."""
    # at this luminance both have a contrast ratio of 4.58
    return WHITE if luminance(background) < 0.179 else BLACK


def luminance(color: RGB) -> float:
    """Return the relative luminance of a colour, 0 ... 1, by WCAG 2."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def to_hex(color: RGB) -> str:
    """Return the colour in CSS notation, #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def format_number(value: float | None) -> str:
    """Return a number with three decimals, never `-0.000`; a dash for None."""
    if value is None:
        return "–"
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


def count_of(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: `1 image`, `1,234 images`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def font(size: float) -> ImageFont.FreeTypeFont:
    """Return Pillow's built-in font at `size` pixels: one object per thread, since FreeType faces are not shareable."""
    return _load_font(size, threading.get_ident())


@lru_cache(maxsize=256)
def _load_font(size: float, thread: int) -> ImageFont.FreeTypeFont:
    return cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))


def measure_text(text: str, size: int) -> float:
    """Return the width in pixels of any text; letters that the built-in font lacks get another font's width."""
    wide = 0
    if not text.isascii():
        wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
        narrow = "".join(c for c in text if unicodedata.east_asian_width(c) not in "WF")
        text = to_drawable(narrow, len(narrow))
    words = text.split(" ")
    return sum(_word_length(word, size) for word in words) + (len(words) - 1) * _word_length(" ", size) + wide * size


@lru_cache(maxsize=8192)
def _word_length(text: str, size: int) -> float:
    return font(size).getlength(text)


def escape_unprintable(text: str) -> str:
    """Return text with unprintable characters (line ends, controls, direction marks, lone surrogates) as \\x0a."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _JOINERS else c.encode("unicode_escape").decode() for c in text)


def to_drawable(text: str, limit: int = 300) -> str:
    """Return one line of at most `limit` characters in the built-in font; unknown letters become `?`."""
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
    # a code point without a glyph draws the same box as any other missing one
    face = font(16)
    return character == " " or bytes(face.getmask(character)) != bytes(face.getmask("\uffff"))


def wrap_text(text: str, size: int, width: float, lines: int = 1) -> list[str]:
    """Return text broken at spaces into at most `lines` lines of `width` pixels; an ellipsis replaces the rest."""
    rest = " ".join(escape_unprintable(text[:_MAX_CHARACTERS]).split())
    out: list[str] = []
    while rest and len(out) < lines:
        if measure_text(rest, size) <= width:
            return [*out, rest]
        if len(out) == lines - 1:
            count = _count_fitting(rest, size, width - measure_text("...", size))
            return [*out, rest[:count].rstrip() + "…"]
        count = _count_fitting(rest, size, width)
        space = rest.rfind(" ", 1, count + 1)
        cut = space if space > 0 else max(count, 1)
        out.append(rest[:cut])
        rest = rest[cut:].lstrip()
    return out


def fit_line(text: str, size: int, width: float) -> str:
    """Return text on one line of `width` pixels; an ellipsis replaces the end where it is too long."""
    return "".join(wrap_text(text, size, width))


def _count_fitting(text: str, size: int, width: float) -> int:
    """Return how many letters of a text fit into a width."""
    too_many = bisect.bisect_right(range(len(text) + 1), width, key=lambda count: measure_text(text[:count], size))
    return max(too_many - 1, 0)
