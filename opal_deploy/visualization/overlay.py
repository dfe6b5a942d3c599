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

from PIL import Image, ImageDraw

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.preprocess.resize import display_size, to_display
from opal_deploy.records.record import Record
from opal_deploy.visualization.boxes import SlotBox, compute_shares, draw_boxes
from opal_deploy.visualization.legend import (
    BOX_NOTE,
    COSINE,
    FIELD_NOTE,
    MIN_WIDTH_EM,
    PAPER,
    Legend,
    build_bars,
    get_prediction,
)

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

    See `boxes.draw_boxes` for what a box looks like.

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
    boxes = place_boxes(record, field)
    notes = [BOX_NOTE] if len(boxes) > 1 and boxes[0].share is not None else []
    legend = Legend(record, legend_width, size, " ".join([*notes, *([FIELD_NOTE] if field is not None else [])]))
    if beside:
        canvas = Image.new("RGB", (width + MIN_WIDTH_EM * size, max(height, legend.height)), PAPER)
    else:
        canvas = Image.new("RGB", (max(width, MIN_WIDTH_EM * size), height + legend.height), PAPER)
    canvas.paste(photograph, (0, 0))
    draw = ImageDraw.Draw(canvas)
    legend.draw(draw, width if beside else 0, 0 if beside else height)
    draw_boxes(draw, boxes, (width / whole[0], height / whole[1]), (width, height))
    return canvas


def check_display(image: Image.Image, size: tuple[int, int]) -> None:
    """Check that an image has the (width, height) of its record, or is reduced from it as `to_display` does.

    Raises:
        ValueError: it is neither.
    """
    if image.size != size and (0 in size or image.size != display_size(*size)):
        raise ValueError(f"the image is {image.size} pixels but its record says {size}")


def place_boxes(record: Record, field: EffectiveField | None) -> list[SlotBox]:
    """Return the boxes of a record's slots; their contributions count where they add up to the cosine."""
    slots, bars = record.get("evidence", []), build_bars(record)
    shares = compute_shares([bar.value for bar in bars.bars] if bars.meaning == COSINE else [None] * len(slots))
    return [
        SlotBox(slot["slot"], slot["box"], None if field is None else field.surround(slot["cell"], slot["box"]), share)
        for slot, share in zip(slots, shares, strict=True)
    ]


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
