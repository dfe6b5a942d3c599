"""Boxes of slots on a photograph: thin outlines that hide nothing of the cell, and small tags with the slots' numbers.

The strongest slot's outline is thicker; slots that add little are drawn faint. Tags stand outside their boxes, apart
from each other and from other boxes. A line ties a tag to a box that it does not touch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from PIL import Image, ImageDraw

from opal_deploy.visualization.sentences import find_weak
from opal_deploy.visualization.style import INK, RGB, WHITE, font, slot_color, text_color

Rectangle = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels, all inclusive, as ImageDraw takes them
Point = tuple[int, int]
Line = tuple[Point, Point]

# width of a line and font size of a tag, as shares of the photograph's smaller side
_LINE, _LETTERS = 1 / 400, 1 / 38
# smallest font size of tags, in pixels
MIN_LETTERS: Final = 9
# smallest side of a box with a white line
_MIN_WHITE: Final = 10
# opacity of faint boxes
_FAINT: Final = 0.55
# cost per pixel of a tag over boxes, and over other tags
_BOX_COST, _TAG_COST = 6, 200


class Emphasis(IntEnum):
    """How strongly a slot's box is drawn."""

    FAINT = 0
    PLAIN = 1
    STRONGEST = 2


@dataclass(frozen=True)
class SlotBox:
    """A slot's box to draw: (x0, y0, x1, y1) of its cell, in pixels of the image, and how strongly it is drawn."""

    slot: int
    box: Sequence[float]
    emphasis: Emphasis = Emphasis.PLAIN


def pixel_box(box: Sequence[float], scale: tuple[float, float], size: tuple[int, int]) -> Rectangle:
    """Return the pixels (at least one) that a box covers on a photograph of `size`, enlarged by `scale` (x, y)."""
    x0, y0, x1, y1 = (round(value * scale[axis % 2]) for axis, value in enumerate(box))
    left, top = min(max(x0, 0), size[0] - 1), min(max(y0, 0), size[1] - 1)
    return left, top, min(max(x1 - 1, left), size[0] - 1), min(max(y1 - 1, top), size[1] - 1)


def emphasize(parts: Sequence[float | None]) -> list[Emphasis]:
    """Return how the boxes of a class's slots are drawn, from their contributions to the cosine; plain if unknown."""
    known = [part for part in parts if part is not None and math.isfinite(part)]
    if len(known) < len(parts) or max(known, default=0.0) <= 0:
        return [Emphasis.PLAIN] * len(parts)
    emphasis = [Emphasis.FAINT if weak else Emphasis.PLAIN for weak in find_weak(known)]
    if len(known) > 1:
        emphasis[known.index(max(known))] = Emphasis.STRONGEST
    return emphasis


def draw_boxes(
    photograph: Image.Image, slots: Sequence[SlotBox], scale: tuple[float, float], *, min_letters: int = MIN_LETTERS
) -> None:
    """Draw boxes on a photograph, RGB.

    Slots that share a cell share one outline, in the first one's colour, with their tags side by side.

    Args:
        slots: the boxes, in pixels of the image.
        scale: pixels of the photograph per pixel of the image (x, y).
        min_letters: smallest font size of the tags.
    """
    size = photograph.size
    boxes = group_boxes(slots, scale, size)
    line = max(1, round(min(size) * _LINE))
    tags = {tag.slots: tag for tag in place_tags(boxes, size, line, min_letters)}
    for is_faint in (True, False):
        group = [box for box in boxes if (box.emphasis == Emphasis.FAINT) == is_faint]
        if not group:
            continue
        layer = photograph.copy() if is_faint else photograph
        draw = ImageDraw.Draw(layer)
        shown = [tags[box.slots] for box in group if box.slots in tags]
        for tag in shown:
            tag.draw_line(draw)
        for box in sorted(group, key=lambda box: box.emphasis):
            width = line * (2 if box.emphasis == Emphasis.STRONGEST else 1)
            _draw_border(draw, box.box, slot_color(box.slots[0]), width)
        # last: a number may cover a border, never the other way round
        for tag in shown:
            tag.draw(draw)
        if is_faint:
            photograph.paste(Image.blend(photograph, layer, _FAINT))


def group_boxes(slots: Sequence[SlotBox], scale: tuple[float, float], size: tuple[int, int]) -> list[TaggedBox]:
    """Return the boxes on a photograph of `size`, one for all slots that share a cell; see `draw_boxes`."""
    cells: dict[Rectangle, list[SlotBox]] = {}
    for slot in slots:
        cells.setdefault(pixel_box(slot.box, scale, size), []).append(slot)
    return [
        TaggedBox(box, tuple(slot.slot for slot in group), max(slot.emphasis for slot in group))
        for box, group in cells.items()
    ]


def _draw_border(draw: ImageDraw.ImageDraw, box: Rectangle, color: RGB, line: int) -> None:
    """Draw a dark line around a box, and a coloured and a white one inside it: one contrasts with any background."""
    side = min(box[2] - box[0], box[3] - box[1]) + 1
    line = max(1, min(line, side // 6))
    draw.rectangle(_shrink(box, -1), outline=INK)
    if side >= 6 * line and side >= _MIN_WHITE:
        draw.rectangle(_shrink(box, line), outline=WHITE)
    draw.rectangle(box, outline=color, width=line)


def _shrink(box: Rectangle, by: int) -> Rectangle:
    return box[0] + by, box[1] + by, box[2] - by, box[3] - by


@dataclass(frozen=True)
class TaggedBox:
    """A box, in pixels of the photograph, with the slots that share it and the largest of their emphases."""

    box: Rectangle
    slots: tuple[int, ...]
    emphasis: Emphasis = Emphasis.PLAIN


@dataclass(frozen=True)
class Tag:
    """The slot numbers of one box, side by side; `line` ties the tag to a box that it does not touch, else None."""

    slots: tuple[int, ...]
    place: Rectangle
    letters: int
    casing: int
    line: Line | None = None

    def draw_line(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw the line to the box."""
        if self.line is not None:
            draw.line(self.line, fill=INK, width=3 * self.casing)
            draw.line(self.line, fill=slot_color(self.slots[0]), width=self.casing)

    def chips(self) -> Iterator[tuple[int, Rectangle]]:
        """Yield each slot with the place of its number, edge included."""
        width, height = _chip_size(self.slots, self.letters)
        left, y = self.place[:2]
        for index, slot in enumerate(self.slots):
            x = left + index * (width + self.casing)
            yield slot, (x, y, x + width + 2 * self.casing - 1, y + height + 2 * self.casing - 1)

    def draw(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw the numbers on their slots' colours."""
        for slot, edge in self.chips():
            color = slot_color(slot)
            draw.rectangle(edge, fill=color, outline=INK, width=self.casing)
            center = ((edge[0] + edge[2] + 1) / 2, (edge[1] + edge[3] + 1) / 2)
            draw.text(center, str(slot), text_color(color), font(self.letters), "mm")


def place_tags(
    boxes: Sequence[TaggedBox], size: tuple[int, int], casing: int, min_letters: int = MIN_LETTERS
) -> list[Tag]:
    """Return the tags of boxes, strongest first; stronger ones choose their places first.

    Tags lie inside the photograph and hide as little as possible of boxes and of each other. A tag without room is left
    out; the report names the colours too.

    Args:
        casing: width of the tags' dark edge, in pixels.
        min_letters: smallest font size.
    """
    tags: list[Tag] = []
    letters, rectangles = max(min_letters, round(min(size) * _LETTERS)), [tagged.box for tagged in boxes]
    for tagged in sorted(boxes, key=lambda tagged: -tagged.emphasis):
        if tag := _place_tag(tagged, size, casing, letters, rectangles, tags):
            tags.append(tag)
    return tags


def _place_tag(
    tagged: TaggedBox, size: tuple[int, int], casing: int, letters: int, boxes: Sequence[Rectangle], tags: Sequence[Tag]
) -> Tag | None:
    chip_width, chip_height = _chip_size(tagged.slots, letters)
    width, height = len(tagged.slots) * (chip_width + casing) + casing, chip_height + 2 * casing
    if width > size[0] or height > size[1]:
        return None
    x0, y0, x1, y1 = tagged.box
    # inside the box, where nothing else is left
    inside = min(x0, size[0] - width), min(y0, size[1] - height)
    best = Tag(tagged.slots, (*inside, inside[0] + width - 1, inside[1] + height - 1), letters, casing)
    least, taken = math.inf, [tag.place for tag in tags]
    for gap in range(0, 7 * height, height):
        if gap == 0 and height > y1 - y0 + 1:
            continue  # next to a smaller box it would look like the box
        xs, ys = (x0 - gap, (x0 + x1 + 1 - width) // 2, x1 + 1 - width + gap), (y0 - height - gap, y1 + 1 + gap)
        for x, y in (*itertools.product(xs, ys), (x1 + 1 + gap, y0), (x0 - width - gap, y0)):
            place = x, y, x + width - 1, y + height - 1
            if not (0 <= x <= size[0] - width and 0 <= y <= size[1] - height):
                continue
            cost = gap + _BOX_COST * _overlap(place, boxes) + _TAG_COST * _overlap(place, taken)
            if cost < least:
                best, least = replace(best, place=place, line=_connect(tagged.box, place) if gap else None), cost
    return best


def _chip_size(slots: Sequence[int], letters: int) -> tuple[int, int]:
    """Return width and height of one number without its edge."""
    return round(font(letters).getlength(str(max(slots)))) + round(letters * 0.6), round(letters * 1.05)


def _overlap(place: Rectangle, others: Sequence[Rectangle]) -> int:
    """Return the number of a rectangle's pixels that others cover; each other counts separately."""
    x0, y0, x1, y1 = place
    return sum(
        max(0, min(x1, right) - max(x0, left) + 1) * max(0, min(y1, bottom) - max(y0, top) + 1)
        for left, top, right, bottom in others
    )


def _connect(box: Rectangle, place: Rectangle) -> Line:
    """Return the ends of a short line from a box to a tag."""
    middle = (place[0] + place[2]) // 2, (place[1] + place[3]) // 2
    start = min(max(middle[0], box[0]), box[2]), min(max(middle[1], box[1]), box[3])
    return start, (min(max(start[0], place[0]), place[2]), min(max(start[1], place[1]), place[3]))
