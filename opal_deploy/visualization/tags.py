"""The numbers of slots on a photograph: how large they are and where they stand.

A tag is never larger than its box. Where that would be too small to read it stands apart, tied to the box by a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from opal_deploy.visualization.legend import INK
from opal_deploy.visualization.palette import slot_color, text_color
from opal_deploy.visualization.text import draw_text, font, text_length

Rectangle = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels, all inclusive, as ImageDraw takes them
Point = tuple[int, int]
Line = tuple[Point, Point]

# the size of letters: the strongest slot's, and the least, as shares of the photograph's smaller side
_LARGE: Final = 1 / 24
_SMALL: Final = 1 / 40
_MIN_LARGE, _MIN_SMALL = 11, 9
# where tags that stand apart may be: distances in heights of a tag, and how many directions
_DISTANCES: Final = (0.8, 1.5, 2.3, 3.2)
_DIRECTIONS: Final = 16
# a tag that stands apart is worth hiding this share of itself of a box
_APART_COST: Final = 0.3
# the cost of each pixel of a tag, and of a line, that lies on a box, on another tag and on another line
_TAG_OVER: Final = np.array([1, 50, 20])
_LINE_OVER: Final = np.array([4, 4, 15])


@dataclass(frozen=True)
class TaggedBox:
    """A box and the slots that share it.

    Attributes:
        box: in pixels of the photograph.
        slots: in their order.
        share: the largest contribution among them as a share of the image's largest, in [0, 1].
    """

    box: Rectangle
    slots: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Tag:
    """The placed numbers of the slots of one box.

    Attributes:
        slots: the numbers, side by side, `per_row` in a row.
        place: all that the tag covers.
        letters: the size of its letters in pixels.
        casing: the width of its dark edge in pixels.
        per_row: numbers in a row.
        line: the ends of the line to its box; None where it touches the box.
    """

    slots: tuple[int, ...]
    place: Rectangle
    letters: int
    casing: int
    per_row: int
    line: Line | None = None

    def draw_line(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw the line to the box, in the first slot's colour on a dark one."""
        if self.line is not None:
            draw.line(self.line, fill=INK, width=3 * self.casing)
            draw.line(self.line, fill=slot_color(self.slots[0]), width=self.casing)

    def draw(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw the numbers on their colours."""
        face = font(self.letters)
        width, height = _chip_size(self.slots, self.letters)
        for index, slot in enumerate(self.slots):
            row, column = divmod(index, self.per_row)
            x, y = self.place[0] + column * (width + self.casing), self.place[1] + row * (height + self.casing)
            edge = (x, y, x + width + 2 * self.casing - 1, y + height + 2 * self.casing - 1)
            color = slot_color(slot)
            draw.rectangle(edge, fill=color, outline=INK, width=self.casing)
            center = ((edge[0] + edge[2] + 1) / 2, (edge[1] + edge[3] + 1) / 2)
            draw_text(draw, center, str(slot), text_color(color), face, "mm")


def place_tags(boxes: Sequence[TaggedBox], size: tuple[int, int], casing: int) -> list[Tag]:
    """Return the tags of boxes, those of the strongest first, which have the choice of places.

    Tags lie inside the photograph, and hide as little of each other and of boxes as they can. One that the photograph
    has no room for is left out: the legend names the colours too.

    Args:
        boxes: with the slots whose numbers they get.
        size: width and height of the photograph.
        casing: width of the tags' dark edge, in pixels.
    """
    tags: list[Tag] = []
    for tagged in sorted(boxes, key=lambda each: -each.share):
        tag = _place_tag(tagged, size, casing, [each.box for each in boxes], tags)
        if tag is not None:
            tags.append(tag)
    return tags


def _place_tag(
    tagged: TaggedBox, size: tuple[int, int], casing: int, boxes: Sequence[Rectangle], tags: Sequence[Tag]
) -> Tag | None:
    letters, apart = _fit_letters(tagged, size, casing)
    chip_width, chip_height = _chip_size(tagged.slots, letters)
    count = len(tagged.slots)
    per_row = max(1, min(count, (size[0] - casing) // (chip_width + casing)))
    width = per_row * (chip_width + casing) + casing
    height = -(-count // per_row) * (chip_height + casing) + casing
    if width > size[0] or height > size[1]:
        return None
    drawn = [tag.place for tag in tags], [_bound(tag.line) for tag in tags if tag.line]
    covered = np.array([*boxes, *drawn[0], *drawn[1]])
    kinds = np.repeat([0, 1, 2], [len(boxes), len(drawn[0]), len(drawn[1])])
    weights = _TAG_OVER[kinds]
    touching = _touch(tagged.box, (width, height), size)
    costs = _count_hidden(touching, covered, weights)
    near = Tag(tagged.slots, touching[int(costs.argmin())], letters, casing, per_row)
    if not apart and not costs.min():
        return near
    around = _surround(tagged.box, (width, height), size)
    if not around:
        return near
    lines = [_connect(tagged.box, place) for place in around]
    far_costs = _count_hidden(around, covered, weights) + [math.dist(*line) for line in lines]
    far_costs += _count_hidden([_bound(line) for line in lines], covered, _LINE_OVER[kinds])
    far_costs += _APART_COST * width * height
    if not apart and costs.min() <= far_costs.min():
        return near
    best = int(far_costs.argmin())
    return replace(near, place=around[best], line=lines[best])


def _fit_letters(tagged: TaggedBox, size: tuple[int, int], casing: int) -> tuple[int, bool]:
    """Return the size of a tag's letters, larger for a stronger slot, and whether the box is too small for them."""
    large = max(_MIN_LARGE, round(min(size) * _LARGE))
    small = max(_MIN_SMALL, round(min(size) * _SMALL))
    x0, y0, x1, y1 = tagged.box
    side, length = sorted((x1 - x0 + 1, y1 - y0 + 1))
    for letters in range(round(small + (large - small) * tagged.share), small - 1, -1):
        width, height = _chip_size(tagged.slots, letters)
        if height + 2 * casing <= side and width + 2 * casing <= length:
            return letters, False
    return small, True


def _chip_size(slots: Sequence[int], letters: int) -> tuple[int, int]:
    """Return width and height of one number without its edge."""
    return round(text_length(str(max(slots)), font(letters))) + round(letters * 0.6), round(letters * 1.05)


def _touch(box: Rectangle, tag: tuple[int, int], size: tuple[int, int]) -> list[Rectangle]:
    """Return the places at a box for a tag of `tag` (width, height), inside the photograph, the best first."""
    (x0, y0, x1, y1), (width, height) = box, tag
    right, below = x1 + 1 - width, y1 + 1
    corners = (
        (x0, y0 - height), (right, y0 - height), (x0, below), (right, below), (x1 + 1, y0), (x0 - width, y0), (x0, y0),
    )  # fmt: skip
    inside = ((min(max(x, 0), size[0] - width), min(max(y, 0), size[1] - height)) for x, y in corners)
    return [(x, y, x + width - 1, y + height - 1) for x, y in inside]


def _surround(box: Rectangle, tag: tuple[int, int], size: tuple[int, int]) -> list[Rectangle]:
    """Return the places on rectangles around a box for a tag of `tag` (width, height), inside the photograph."""
    (x0, y0, x1, y1), (width, height) = box, tag
    places = []
    for distance in _DISTANCES:
        for direction in range(_DIRECTIONS):
            # upwards first
            right_by, up_by = (f(2 * math.pi * direction / _DIRECTIONS) for f in (math.sin, math.cos))
            reach = max(abs(right_by), abs(up_by))
            across, down = (x1 - x0 + 1 + width) / 2 + distance * height, (y1 - y0 + 1 + height) / 2 + distance * height
            x = round((x0 + x1 + 1 - width) / 2 + across * right_by / reach)
            y = round((y0 + y1 + 1 - height) / 2 - down * up_by / reach)
            if 0 <= x <= size[0] - width and 0 <= y <= size[1] - height:
                places.append((x, y, x + width - 1, y + height - 1))
    return places


def _connect(box: Rectangle, place: Rectangle) -> Line:
    """Return the ends of a short line from a box to a tag."""
    middle = (place[0] + place[2]) // 2, (place[1] + place[3]) // 2
    start = min(max(middle[0], box[0]), box[2]), min(max(middle[1], box[1]), box[3])
    return start, (min(max(start[0], place[0]), place[2]), min(max(start[1], place[1]), place[3]))


def _bound(line: Line) -> Rectangle:
    """Return the smallest rectangle around a line."""
    (x0, y0), (x1, y1) = line
    return min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)


def _count_hidden(
    places: Sequence[Rectangle], covered: NDArray[np.int64], weights: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return how many pixels of rectangles each place lies on, weighted.

    Args:
        places: N rectangles.
        covered: int [R, 4].
        weights: int [R].

    Returns:
        float64 [N].
    """
    ours = np.array(places)[:, None]
    across = np.minimum(ours[..., 2], covered[:, 2]) - np.maximum(ours[..., 0], covered[:, 0]) + 1
    down = np.minimum(ours[..., 3], covered[:, 3]) - np.maximum(ours[..., 1], covered[:, 1]) + 1
    hidden: NDArray[np.float64] = (across.clip(0) * down.clip(0) @ weights).astype(np.float64)
    return hidden
