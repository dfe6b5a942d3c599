"""The bitmaps on a sheet: the photograph with the boxes of a class, enlarged patches, attention maps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from opal_deploy.visualization.boxes import SlotBox, draw_boxes
from opal_deploy.visualization.overlay import crop_box
from opal_deploy.visualization.palette import RGB
from opal_deploy.visualization.sheet.content import ClassView

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the image
Rectangle = tuple[int, int, int, int]  # x, y, width, height in pixels of a picture on the sheet

# patches enlarged at least this much show pixels as squares: smoothing would invent what is between them
_SQUARES_FROM = 8
# colours from no to most attention: paper, sky blue, dark blue; lightness falls throughout, so it reads in grey too
_COLOR_STOPS: tuple[RGB, ...] = ((250, 250, 248), (120, 185, 225), (8, 60, 110))


def fit_size(size: tuple[int, int], bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the largest (width, height) with the aspect ratio of `size` within `bounds`; at least one pixel each."""
    scale = min(bounds[0] / size[0], bounds[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def draw_class_boxes(
    photograph: Image.Image,
    size: tuple[int, int],
    view: ClassView,
    bounds: tuple[int, int],
    *,
    largest: float | None = None,
    fields: bool = False,
) -> Image.Image:
    """Return the photograph as large as `bounds` allows, with the boxes of one class drawn at that size.

    Args:
        photograph: the whole oriented image, RGB, or what `to_display` returns for it.
        size: (width, height) of the whole image.
        view: the class.
        bounds: (width, height) in pixels.
        largest: the contribution that has the widest line; None: all lines are equal.
        fields: draw effective receptive fields too, where slots have them.
    """
    drawn = enlarge(photograph, bounds)
    scale = (drawn.width / size[0], drawn.height / size[1])
    slots = sorted(view.slots, key=lambda slot: slot.slot)
    boxes = [
        SlotBox(
            slot.slot,
            slot.box,
            slot.field if fields else None,
            None if largest is None else max(0.0, slot.value / largest),
        )
        for slot in slots
    ]
    draw_boxes(ImageDraw.Draw(drawn), boxes, scale, drawn.size)
    return drawn


def enlarge(patch: Image.Image, bounds: tuple[int, int]) -> Image.Image:
    """Return a patch as large as `bounds` (width, height) allows, with its own aspect ratio."""
    size = fit_size(patch.size, bounds)
    squares = size[0] >= _SQUARES_FROM * patch.width
    return patch.resize(size, Image.Resampling.NEAREST if squares else Image.Resampling.LANCZOS)


def cut_context(
    photograph: Image.Image, size: tuple[int, int], box: Box, field: Box | None, bounds: tuple[int, int]
) -> tuple[Image.Image, Rectangle | None]:
    """Return what a slot saw, as large as `bounds` allows: the field, or where it is not known the cell alone.

    The photograph and its size are those of `draw_class_boxes`.

    Returns:
        The pixels, and (x, y, width, height) of the cell within them; None where the cell is all there is.
    """
    drawn = enlarge(crop_box(photograph, field or box, size), bounds)
    return drawn, None if field is None else locate_cell(box, field, drawn.size)


def locate_cell(box: Box, field: Box, size: tuple[int, int]) -> Rectangle:
    """Return (x, y, width, height) of a cell's box on a picture of `size` that shows a field: at least 3 x 3 pixels."""
    across, down = size[0] / (field[2] - field[0]), size[1] / (field[3] - field[1])
    x, y = round((box[0] - field[0]) * across), round((box[1] - field[1]) * down)
    return x, y, max(3, round((box[2] - box[0]) * across)), max(3, round((box[3] - box[1]) * down))


def draw_attention_map(attention: NDArray[np.float32], maximum: float, size: tuple[int, int]) -> Image.Image:
    """Return a slot's attention with one rectangle per cell, from pale (0) to dark (`maximum`), not smoothed.

    Args:
        attention: float32 [H, W].
        maximum: the value of the darkest colour, over 0.
        size: (width, height) of the result in pixels.
    """
    share = np.clip(attention.astype(np.float64) / maximum, 0.0, 1.0)
    stops = np.linspace(0.0, 1.0, len(_COLOR_STOPS))
    colors = np.asarray(_COLOR_STOPS, dtype=np.float64)
    rgb = np.stack([np.interp(share, stops, colors[:, channel]) for channel in range(3)], axis=-1)
    return Image.fromarray(np.round(rgb).astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
