"""Overlays: a photograph with the slots' boxes on it and a legend, for a person to check an answer with.

The photograph keeps its own resolution and every pixel outside boxes and tags, with two exceptions: one of over 2
megapixels, or 4096 pixels a side, is reduced (`display_size`), so that no shape of an image makes a drawing large; one
whose smaller side is under 160 pixels is enlarged, each pixel to k x k, so that boxes and numbers can be read
(`display_scale`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from opal_deploy.artifact.receptive_field import EffectiveField
from opal_deploy.preprocess.resize import display_size, to_display
from opal_deploy.records.record import Record, Slot
from opal_deploy.visualization.legend import FIELD_NOTE, INK, MIN_WIDTH_EM, PAPER, Legend, get_prediction
from opal_deploy.visualization.palette import RGB, WHITE, slot_color, text_color
from opal_deploy.visualization.text import draw_text, font, text_length

Rectangle = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels, all inclusive, as ImageDraw takes them

# a smaller side under _MIN_SIDE is enlarged to about _ENLARGED_SIDE, the longer side to at most _MAX_SIDE
_MIN_SIDE, _ENLARGED_SIDE, _MAX_SIDE = 160, 256, 1600
# from this height over width on the legend stands beside the photograph
_BESIDE_RATIO = 1.6
# no side of a JPEG is longer
_MAX_JPEG_SIDE = 65_500


def display_scale(width: int, height: int) -> int:
    """Return how many times an image is enlarged: 1 unless its smaller side is under 160 pixels.

    The smaller side of a tiny image grows to about 256 pixels, unless the longer one would pass 1600.
    """
    small, long = min(width, height), max(width, height)
    if small >= _MIN_SIDE:
        return 1
    return max(1, min(-(-_ENLARGED_SIDE // small), _MAX_SIDE // long))


def photograph_size(width: int, height: int) -> tuple[int, int]:
    """Return width and height of an image's photograph on its overlay; both have the same upper left corner."""
    scale = display_scale(width, height)
    width, height = display_size(width, height)
    return width * scale, height * scale


def overlay_width(width: int, height: int) -> int:
    """Return the width of the overlay of an image of `width` x `height` pixels."""
    width, height = photograph_size(width, height)
    legend_width = MIN_WIDTH_EM * _font_size(width, height)
    return width + legend_width if height > _BESIDE_RATIO * width else max(width, legend_width)


def _font_size(width: int, height: int) -> int:
    return max(12, round(math.sqrt(width * height) / 30))


def draw_overlay(image: Image.Image, record: Record, field: EffectiveField | None = None) -> Image.Image:
    """Return a photograph with a box for each slot, and the legend below, or beside a tall and narrow photograph.

    Slots that share a cell share one border, dashed in their colours in turn, with their tags side by side.
    Lines lie wholly inside their boxes, so boxes of neighbouring cells never cover each other.

    Args:
        image: the whole image, EXIF orientation applied, or what `to_display` returns for it; not changed.
        record: the image's record; without `evidence` no boxes are drawn, and the legend says so.
        field: draw the cells' effective receptive fields too, dashed, and have the legend tell the two apart.

    Returns:
        RGB; the photograph in the upper left corner, `photograph_size` large.

    Raises:
        ValueError: the record is of another image size, or has no prediction.
    """
    get_prediction(record)
    whole = (record.get("width", 0), record.get("height", 0))
    check_display(image, whole)
    width, height = photograph_size(*whole)
    photograph = to_display(image if image.mode == "RGB" else image.convert("RGB"))
    if photograph.size != (width, height):
        photograph = photograph.resize((width, height), Image.Resampling.NEAREST)

    size = _font_size(width, height)
    beside = height > _BESIDE_RATIO * width
    legend_width = MIN_WIDTH_EM * size if beside else max(width, MIN_WIDTH_EM * size)
    legend = Legend(record, legend_width, size, FIELD_NOTE if field is not None else "")
    if beside:
        canvas = Image.new("RGB", (width + MIN_WIDTH_EM * size, max(height, legend.height)), PAPER)
    else:
        canvas = Image.new("RGB", (max(width, MIN_WIDTH_EM * size), height + legend.height), PAPER)
    canvas.paste(photograph, (0, 0))
    draw = ImageDraw.Draw(canvas)
    legend.draw(draw, width if beside else 0, 0 if beside else height)
    boxes = [SlotBox.of(slot, field) for slot in record.get("evidence", [])]
    draw_boxes(draw, boxes, (width / whole[0], height / whole[1]), (width, height))
    return canvas


def check_display(image: Image.Image, size: tuple[int, int]) -> None:
    """Check that an image has the (width, height) of its record, or is reduced from it as `to_display` does.

    Raises:
        ValueError: it is neither.
    """
    if image.size != size and (0 in size or image.size != display_size(*size)):
        raise ValueError(f"the image is {image.size} pixels but its record says {size}")


@dataclass(frozen=True)
class SlotBox:
    """A slot's cell and, to draw it too, its effective field: (x0, y0, x1, y1) in pixels of the image."""

    slot: int
    box: Sequence[float]
    field: Sequence[float] | None = None

    @staticmethod
    def of(slot: Slot, field: EffectiveField | None) -> SlotBox:
        """Return the box of a record's slot."""
        surround = None if field is None else field.surround(slot["cell"], slot["box"])
        return SlotBox(slot["slot"], slot["box"], surround)


def encode_jpeg(overlay: Image.Image, quality: int = 90) -> bytes:
    """Return an image as JPEG with colour at full resolution, which thin coloured lines need.

    `overlay` is reduced in place where a side exceeds what JPEG allows.
    """
    overlay.thumbnail((_MAX_JPEG_SIDE, _MAX_JPEG_SIDE))
    buffer = io.BytesIO()
    overlay.save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def crop_box(image: Image.Image, box: Sequence[float], size: tuple[int, int]) -> Image.Image:
    """Return the pixels of a box: at least one, none outside the image.

    Args:
        image: the whole image, or what `to_display` returns for it.
        box: (x0, y0, x1, y1), x1 and y1 exclusive, in pixels of the whole image.
        size: (width, height) of the whole image.
    """
    x0, y0, x1, y1 = (round(value * image.size[axis % 2] / size[axis % 2]) for axis, value in enumerate(box))
    left, top = min(max(x0, 0), image.width - 1), min(max(y0, 0), image.height - 1)
    right, bottom = min(max(x1, left + 1), image.width), min(max(y1, top + 1), image.height)
    return image.crop((left, top, right, bottom))


def pixel_box(box: Sequence[float], scale: tuple[float, float], size: tuple[int, int]) -> Rectangle:
    """Return the pixels that a box covers on a photograph of `size`, enlarged by `scale` along x and y.

    At least one, none outside.
    """
    x0, y0, x1, y1 = (round(value * scale[axis % 2]) for axis, value in enumerate(box))
    left, top = min(max(x0, 0), size[0] - 1), min(max(y0, 0), size[1] - 1)
    return left, top, min(max(x1 - 1, left), size[0] - 1), min(max(y1 - 1, top), size[1] - 1)


def draw_boxes(
    draw: ImageDraw.ImageDraw, slots: Sequence[SlotBox], scale: tuple[float, float], size: tuple[int, int]
) -> None:
    """Draw boxes, and fields where slots have them, on a photograph in the upper left corner of a canvas.

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
    for group in cells.values():
        if group[0].field is not None:
            colors = [slot_color(slot.slot) for slot in group]
            _draw_field(draw, pixel_box(group[0].field, scale, size), colors, max(2, 2 * line // 3))
    for box, group in cells.items():
        _draw_border(draw, box, [slot_color(slot.slot) for slot in group], line)
    # after all borders: a number may cover a line, never the other way round
    tags: list[Rectangle] = []
    for box, group in cells.items():
        _draw_tags(draw, box, [slot.slot for slot in group], size, line, list(cells), tags)


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
    border = (min(box[2] - box[0], box[3] - box[1]) + 1) // 3  # the middle third always stays the photograph's
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


def _draw_tags(
    draw: ImageDraw.ImageDraw,
    box: Rectangle,
    group: list[int],
    size: tuple[int, int],
    line: int,
    boxes: list[Rectangle],
    tags: list[Rectangle],
) -> None:
    letters = max(11, round(min(size) / 24))
    face, casing = font(letters), max(1, line // 2)
    chip_width = round(text_length(str(max(group)), face)) + round(letters * 0.6)
    chip_height = round(letters * 1.15)
    per_row = max(1, min(len(group), (size[0] - casing) // (chip_width + casing)))
    rows = -(-len(group) // per_row)
    width, height = per_row * (chip_width + casing) + casing, rows * (chip_height + casing) + casing
    if width > size[0] or height > size[1]:
        return  # the legend's swatches still name the colours
    left, top = _place_tag(box, (width, height), size, boxes, tags)
    tags.append((left, top, left + width - 1, top + height - 1))
    for i, slot in enumerate(group):
        row, column = divmod(i, per_row)
        x, y = left + column * (chip_width + casing), top + row * (chip_height + casing)
        edge = (x, y, x + chip_width + 2 * casing - 1, y + chip_height + 2 * casing - 1)
        color = slot_color(slot)
        draw.rectangle(edge, fill=color, outline=INK, width=casing)
        center = ((edge[0] + edge[2] + 1) / 2, (edge[1] + edge[3] + 1) / 2)
        draw_text(draw, center, str(slot), text_color(color), face, "mm")


def _place_tag(
    box: Rectangle, tag: tuple[int, int], size: tuple[int, int], boxes: list[Rectangle], tags: list[Rectangle]
) -> tuple[int, int]:
    """Return the upper left corner of a tag at its box, inside the image, hiding least of other tags, then of boxes."""
    (x0, y0, x1, y1), (width, height) = box, tag
    right, below = x1 + 1 - width, y1 + 1
    corners = (
        (x0, y0 - height), (right, y0 - height), (x0, below), (right, below), (x1 + 1, y0), (x0 - width, y0), (x0, y0),
    )  # fmt: skip
    best, least = (0, 0), float("inf")
    for corner_x, corner_y in corners:
        x, y = min(max(corner_x, 0), size[0] - width), min(max(corner_y, 0), size[1] - height)
        place = (x, y, x + width - 1, y + height - 1)
        hidden = 8 * sum(_overlap(place, t) for t in tags) + sum(_overlap(place, b) for b in boxes)
        if hidden < least:
            best, least = (x, y), hidden
        if not hidden:
            break
    return best


def _overlap(a: Rectangle, b: Rectangle) -> int:
    width = min(a[2], b[2]) - max(a[0], b[0]) + 1
    height = min(a[3], b[3]) - max(a[1], b[1]) + 1
    return width * height if width > 0 and height > 0 else 0


def _shrink(box: Rectangle, by: int) -> Rectangle:
    return box[0] + by, box[1] + by, box[2] - by, box[3] - by
