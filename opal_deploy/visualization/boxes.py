"""The boxes of slots on a photograph: borders as wide as what their slots contribute, and the slots' numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from PIL import ImageDraw

from opal_deploy.visualization.legend import INK
from opal_deploy.visualization.palette import RGB, WHITE, slot_color
from opal_deploy.visualization.tags import Rectangle, TaggedBox, place_tags

# the share that slots are drawn with where theirs is not known
_UNKNOWN_SHARE: Final = 0.5


@dataclass(frozen=True)
class SlotBox:
    """A slot's cell, to be drawn.

    Attributes:
        slot: the slot.
        box: (x0, y0, x1, y1) of the cell, in pixels of the image.
        field: the same of its effective field, to draw it too.
        share: the slot's contribution as a share of the largest, in [0, 1]; None where that means nothing.
    """

    slot: int
    box: Sequence[float]
    field: Sequence[float] | None = None
    share: float | None = None


def pixel_box(box: Sequence[float], scale: tuple[float, float], size: tuple[int, int]) -> Rectangle:
    """Return the pixels that a box covers on a photograph of `size`, enlarged by `scale` along x and y.

    At least one, none outside.
    """
    x0, y0, x1, y1 = (round(value * scale[axis % 2]) for axis, value in enumerate(box))
    left, top = min(max(x0, 0), size[0] - 1), min(max(y0, 0), size[1] - 1)
    return left, top, min(max(x1 - 1, left), size[0] - 1), min(max(y1 - 1, top), size[1] - 1)


def compute_shares(values: Sequence[float | None]) -> list[float | None]:
    """Return contributions as shares of the largest, in [0, 1]; None for all unless all are numbers, one above 0."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    largest = max(known, default=0.0)
    if len(known) < len(values) or largest <= 0:
        return [None] * len(values)
    return [max(0.0, value / largest) for value in known]


def draw_boxes(
    draw: ImageDraw.ImageDraw, slots: Sequence[SlotBox], scale: tuple[float, float], size: tuple[int, int]
) -> None:
    """Draw boxes, and fields where slots have them, on a photograph in the upper left corner of a canvas.

    A box's line is as wide as its slot's share of the largest contribution says, five times as wide for the largest as
    for none; where shares are not known all are equal. Stronger ones lie over weaker ones. Slots that share a cell
    share one border, dashed in their colours in turn, with their tags side by side. Lines lie wholly inside their
    boxes, so boxes of neighbouring cells never cover each other.

    Args:
        draw: the canvas.
        slots: in pixels of the image.
        scale: pixels of the photograph per pixel of the image, along x and y.
        size: width and height of the photograph.
    """
    cells: dict[Rectangle, list[SlotBox]] = {}
    for slot in slots:
        cells.setdefault(pixel_box(slot.box, scale, size), []).append(slot)
    line = max(2, round(min(size) / 125))
    boxes = [
        TaggedBox(
            box,
            tuple(slot.slot for slot in group),
            max(_UNKNOWN_SHARE if slot.share is None else slot.share for slot in group),
        )
        for box, group in cells.items()
    ]
    boxes.sort(key=lambda each: each.share)
    for each in boxes:
        field = cells[each.box][0].field
        if field is not None:
            _draw_field(draw, pixel_box(field, scale, size), _colors(each), max(2, 2 * line // 3))
    tags = place_tags(boxes, size, max(1, line // 2))
    for tag in tags:
        tag.draw_line(draw)
    for each in boxes:
        _draw_border(draw, each.box, _colors(each), max(1, round(line * (1 + 4 * each.share) / 3)))
    # after all borders: a number may cover a line, never the other way round
    for tag in reversed(tags):
        tag.draw(draw)


def _colors(tagged: TaggedBox) -> list[RGB]:
    return [slot_color(slot) for slot in tagged.slots]


def _draw_field(draw: ImageDraw.ImageDraw, box: Rectangle, colors: list[RGB], line: int) -> None:
    """Draw a dashed rectangle in the colours in turn, on a dark line that shows where the ground has their colour."""
    draw.rectangle(box, outline=INK, width=line)
    x0, y0, x1, y1 = box
    dash = 5 * line + 3
    count = 0
    for x in range(x0, x1 + 1, 2 * dash):
        end = min(x + dash - 1, x1)
        draw.rectangle((x, y0, end, y0 + line - 1), fill=colors[count % len(colors)])
        draw.rectangle((x, y1 - line + 1, end, y1), fill=colors[count % len(colors)])
        count += 1
    for y in range(y0, y1 + 1, 2 * dash):
        end = min(y + dash - 1, y1)
        draw.rectangle((x0, y, x0 + line - 1, end), fill=colors[count % len(colors)])
        draw.rectangle((x1 - line + 1, y, x1, end), fill=colors[count % len(colors)])
        count += 1


def _draw_border(draw: ImageDraw.ImageDraw, box: Rectangle, colors: list[RGB], line: int) -> None:
    """Draw dark, coloured and white frames inside each other: one of them shows on any background."""
    side = min(box[2] - box[0], box[3] - box[1]) + 1
    border = max(
        side // 4, min(side // 3, 6)
    )  # the middle half stays the photograph's, of a small box the middle third
    line = max(1, min(line, border - 2))
    casing = min(max(1, line // 2), max(0, (border - line) // 2))
    if casing:
        draw.rectangle(box, outline=INK, width=casing)
    _draw_frame(draw, _shrink(box, casing), colors, line)
    inner = _shrink(box, casing + line)
    if casing and inner[2] >= inner[0] and inner[3] >= inner[1]:
        draw.rectangle(inner, outline=WHITE, width=casing)


def _draw_frame(draw: ImageDraw.ImageDraw, box: Rectangle, colors: list[RGB], line: int) -> None:
    draw.rectangle(box, outline=colors[0], width=line)
    if len(colors) == 1:
        return
    x0, y0, x1, y1 = box
    width, height = x1 - x0 + 1, y1 - y0 + 1
    # every side shows every colour, in dashes about six lines long; opposite sides start with different colours
    for side, length in enumerate((width, height, width, height)):
        count = max(1, length // (6 * line * len(colors))) * len(colors)
        for i in range(count):
            a, b = length * i // count, length * (i + 1) // count - 1
            if b < a:
                continue
            color = colors[(i + side) % len(colors)]
            dash = (
                (x0 + a, y0, x0 + b, y0 + line - 1),
                (x1 - line + 1, y0 + a, x1, y0 + b),
                (x1 - b, y1 - line + 1, x1 - a, y1),
                (x0, y1 - b, x0 + line - 1, y1 - a),
            )[side]
            if dash[2] >= dash[0] and dash[3] >= dash[1]:
                draw.rectangle(dash, fill=color)


def _shrink(box: Rectangle, by: int) -> Rectangle:
    return box[0] + by, box[1] + by, box[2] - by, box[3] - by
