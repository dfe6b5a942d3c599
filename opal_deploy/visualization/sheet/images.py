"""The pictures on a sheet: the photograph with its boxes, patches of it, attention maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.records.record import RECORD_SCHEMA, Record, Slot
from opal_deploy.visualization.overlay import display_scale, draw_overlay, photograph_size
from opal_deploy.visualization.palette import RGB
from opal_deploy.visualization.sheet.content import ClassView, SlotView

# from this enlargement on pixels are shown as squares: smoothing would invent what is between them
_SQUARES = 8
# of the ramp from nothing to most: paper, sky blue, dark blue; lightness falls throughout, so it reads in grey too
_RAMP: tuple[RGB, ...] = ((250, 250, 248), (120, 185, 225), (8, 60, 110))


def fit_size(size: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    """`size` scaled up or down to the largest that lies in `room`; at least one pixel each way."""
    share = min(room[0] / size[0], room[1] / size[1])
    return max(1, round(size[0] * share)), max(1, round(size[1] * share))


def draw_class_boxes(photograph: Image.Image, view: ClassView, room: tuple[int, int]) -> Image.Image:
    """The whole picture as large as `room` allows, with the boxes of one class drawn at that size.

    Args:
        photograph: RGB, the whole oriented picture.
        view: whose boxes.
        room: (width, height).
    """
    size = fit_size(photograph.size, room)
    across, down = size[0] / photograph.width, size[1] / photograph.height
    record: Record = {
        "schema": RECORD_SCHEMA,
        "image": None,
        "status": "ok",
        "width": size[0],
        "height": size[1],
        "prediction": {
            "class_id": view.class_id, "label": view.label, "logit": view.logit, "cosine": view.cosine,
        },
        "evidence": [_scale_slot(slot, across, down) for slot in sorted(view.slots, key=lambda slot: slot.slot)],
    }  # fmt: skip
    drawn = draw_overlay(photograph.resize(size, Image.Resampling.LANCZOS), record)
    cut = drawn.crop((0, 0, *photograph_size(*size)))
    # what is drawn larger because it is tiny goes back to the room that it has
    return cut if display_scale(*size) == 1 else cut.resize(size, Image.Resampling.LANCZOS)


def _scale_slot(slot: SlotView, across: float, down: float) -> Slot:
    x0, y0, x1, y1 = slot.box
    return {
        "slot": slot.slot,
        "channel": slot.channel,
        "cell": list(slot.cell),
        "score": slot.score,
        "contribution": slot.contribution,
        "box": [x0 * across, y0 * down, x1 * across, y1 * down],
    }


def crop_box(photograph: Image.Image, box: Sequence[float]) -> Image.Image:
    """The pixels of a box, x1 and y1 exclusive, in their own resolution; at least one, none outside the picture."""
    left = min(max(round(box[0]), 0), photograph.width - 1)
    top = min(max(round(box[1]), 0), photograph.height - 1)
    right = min(max(round(box[2]), left + 1), photograph.width)
    bottom = min(max(round(box[3]), top + 1), photograph.height)
    return photograph.crop((left, top, right, bottom))


def enlarge(picture: Image.Image, room: tuple[int, int]) -> Image.Image:
    """A patch as large as `room` allows, with its own aspect ratio."""
    size = fit_size(picture.size, room)
    squares = size[0] >= _SQUARES * picture.width
    return picture.resize(size, Image.Resampling.NEAREST if squares else Image.Resampling.LANCZOS)


def draw_attention_map(attention: NDArray[np.float32], most: float, size: tuple[int, int]) -> Image.Image:
    """A slot's attention: every cell one rectangle, from pale (0) to dark (`most`); nothing is smoothed.

    Args:
        attention: float32 [H, W].
        most: the value of the darkest colour, over 0.
        size: (width, height) of the result.
    """
    share = np.clip(attention.astype(np.float64) / most, 0.0, 1.0)
    stops = np.linspace(0.0, 1.0, len(_RAMP))
    ramp = np.asarray(_RAMP, dtype=np.float64)
    colours = np.stack([np.interp(share, stops, ramp[:, channel]) for channel in range(3)], axis=-1)
    return Image.fromarray(np.round(colours).astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
