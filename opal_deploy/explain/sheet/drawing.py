"""What a laid-out sheet consists of, for any renderer: rectangles, lines of text, pictures, at fixed places."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal, TypeAlias

from PIL import Image

from opal_deploy.explain.palette import RGB
from opal_deploy.explain.text import drawable, font, text_length, visible

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
class Picture:
    """Pixels at a place, in the size that they have; `alt` says in words what they show."""

    x: int
    y: int
    image: Image.Image
    alt: str


Element: TypeAlias = Rect | Text | Picture


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
    return text_length(drawable(narrow, len(narrow)), font(size)) + wide * size


def lines_of(text: str, size: int, width: float, lines: int = 1) -> list[str]:
    """`text` (from anywhere) on at most `lines` lines of `width` pixels, broken at spaces; the rest is an ellipsis."""
    rest = " ".join(visible(text[:2000]).split())
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


def one_line(text: str, size: int, width: float) -> str:
    """`lines_of` with one line."""
    return "".join(lines_of(text, size, width))


def middle_cut(text: str, size: int, width: float) -> str:
    """One line of which the middle goes where it is too long: a file's name is told by its end."""
    whole = " ".join(visible(text[-2000:]).split())
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
