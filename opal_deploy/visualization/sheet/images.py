"""The bitmaps on a sheet: the photograph with the boxes of a class, enlarged patches, attention maps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.records.record import RECORD_SCHEMA, Record, Slot
from opal_deploy.visualization.overlay import display_scale, draw_overlay, photograph_size
from opal_deploy.visualization.palette import RGB
from opal_deploy.visualization.sheet.content import ClassView, SlotView

# patches enlarged at least this much show pixels as squares: smoothing would invent what is between them
_SQUARES_FROM = 8
# colours from no to most attention: paper, sky blue, dark blue; lightness falls throughout, so it reads in grey too
_COLOR_STOPS: tuple[RGB, ...] = ((250, 250, 248), (120, 185, 225), (8, 60, 110))


def fit_size(size: tuple[int, int], bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the largest (width, height) with the aspect ratio of `size` within `bounds`; at least one pixel each."""
    scale = min(bounds[0] / size[0], bounds[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def draw_class_boxes(photograph: Image.Image, view: ClassView, bounds: tuple[int, int]) -> Image.Image:
    """Return the photograph as large as `bounds` allows, with the boxes of one class drawn at that size.

    Args:
        photograph: the whole oriented image, RGB.
        view: the class.
        bounds: (width, height) in pixels.
    """
    size = fit_size(photograph.size, bounds)
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
    overlay = draw_overlay(photograph.resize(size, Image.Resampling.LANCZOS), record)
    boxes = overlay.crop((0, 0, *photograph_size(*size)))
    # an overlay enlarges tiny images; here they have to fit their bounds
    return boxes if display_scale(*size) == 1 else boxes.resize(size, Image.Resampling.LANCZOS)


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


def enlarge(patch: Image.Image, bounds: tuple[int, int]) -> Image.Image:
    """Return a patch as large as `bounds` (width, height) allows, with its own aspect ratio."""
    size = fit_size(patch.size, bounds)
    squares = size[0] >= _SQUARES_FROM * patch.width
    return patch.resize(size, Image.Resampling.NEAREST if squares else Image.Resampling.LANCZOS)


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
