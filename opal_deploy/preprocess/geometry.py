"""The part of an image that the model sees, and the box of each cell of the feature map on that image.

An image is oriented (EXIF), cropped to a box (x0, y0, x1, y1) if one is given, and resized to H0 x W0 without keeping
its aspect ratio. All three steps are axis-aligned and linear, so a cell (row, col) of the H x W grid is a rectangle of
the oriented image, `x = x0 + col / W * (x1 - x0)`, `y = y0 + row / H * (y1 - y0)` (paper, Sec. 3.4: linear rescaling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

from opal_deploy.errors import ImageError

Box = tuple[float, float, float, float]


class RelativeBox(NamedTuple):
    """A `Box` in shares of the oriented image's width and height, as detectors give it."""

    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True)
class Geometry:
    """The size of an image and the part of it that is resized to the model's input.

    Attributes:
        width, height: of the whole image in pixels, EXIF orientation applied.
        crop: (x0, y0, x1, y1) in integer pixels of that image, x1 and y1 exclusive; the whole image without a box.
            Of a letterboxed image it reaches beyond, to the ends of the bars.
    """

    width: int
    height: int
    crop: tuple[int, int, int, int]

    @staticmethod
    def whole(width: int, height: int) -> Geometry:
        """Return the geometry of an image that is not cropped."""
        return Geometry(width, height, (0, 0, width, height))


def compute_geometry(size: tuple[int, int], box: Box | None = None) -> Geometry:
    """Return the part of an image that the model sees; raise ImageError (`bad_box`) if no pixel is left.

    Args:
        size: (width, height) of the whole image, EXIF orientation applied.
        box: (x0, y0, x1, y1) in pixels of that image, x1 and y1 exclusive; truncated to integers as in the part metrics
            of Huang et al. (2023), then clipped to the image. The paper's authors have no code that crops; PIP-Net's,
            which they point to, rounds to the nearest integer and paints black what lies outside the image. CUB's boxes
            are integers. A `RelativeBox` is rounded to the nearest pixels. None: the whole image.
    """
    width, height = size
    if box is None:
        return Geometry.whole(width, height)
    if not all(map(math.isfinite, box)):
        raise ImageError("bad_box", f"box {_format(box)} is not four finite numbers")
    if isinstance(box, RelativeBox):
        box = cast(Box, tuple(round(share * length) for share, length in zip(box, (width, height) * 2, strict=True)))
    x0, y0, x1, y1 = (int(value) for value in box)
    crop = (max(x0, 0), max(y0, 0), min(x1, width), min(y1, height))
    if crop[0] >= crop[2] or crop[1] >= crop[3]:
        raise ImageError("bad_box", f"box {_format(box)} has no pixel of the {width}x{height} image")
    return Geometry(width, height, crop)


def _format(box: Box) -> str:
    return "(" + ", ".join(f"{value:g}" for value in box) + ")"
