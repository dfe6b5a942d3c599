"""Masks of objects and regions: boxes, COCO's segmentations, and Oxford-IIIT Pet's trimaps.

A COCO segmentation (https://cocodataset.org/#format-data) is a list of polygons [x0, y0, x1, y1, ...], or run lengths
{"size": [height, width], "counts": [...]} that go down the columns and begin with background.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

# a trimap's pixels: 1 the pet, 2 the background, 3 the border between them
_BACKGROUND = 2


def read_trimap(path: Path) -> NDArray[np.bool_]:
    """Return the pet's pixels in a trimap, its border included: bool [H, W]; UsageError if it cannot be read."""
    try:
        with Image.open(path) as image:
            return np.asarray(np.asarray(image) != _BACKGROUND)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{path}: not a readable trimap ({error}); unpack the annotations again") from None


def draw_boxes(boxes: Sequence[Box], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the pixels in any of some boxes of an image, bool [H, W] of `size`."""
    covered = np.zeros(size, np.bool_)
    for box in boxes:
        x0, y0, x1, y1 = (max(round(edge), 0) for edge in box)
        covered[y0:y1, x0:x1] = True
    return covered


def draw_segmentations(segmentations: Sequence[Any], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the pixels in any of some COCO segmentations of an image, bool [H, W] of `size`; ValueError if damaged."""
    height, width = size
    layer = Image.new("1", (width, height))
    pen = ImageDraw.Draw(layer)
    covered = np.zeros(size, np.bool_)
    for segmentation in segmentations:
        if isinstance(segmentation, dict):
            covered |= _decode_runs(segmentation, size)
            continue
        for polygon in segmentation:
            # the centre of Pillow's pixel (x, y) is (x, y), of COCO's (x + 0.5, y + 0.5)
            corners = [float(value) - 0.5 for value in polygon]
            if len(corners) < 6 or len(corners) % 2:
                raise ValueError(f"a polygon of {len(corners)} numbers")
            pen.polygon(corners, fill=1)
    return np.asarray(covered | np.asarray(layer))


def _decode_runs(runs: dict[str, Any], size: tuple[int, int]) -> NDArray[np.bool_]:
    if isinstance(runs["counts"], str):
        raise ValueError("compressed run lengths; write polygons or lists of counts")
    lengths = [int(length) for length in runs["counts"]]
    if list(runs["size"]) != list(size) or min(lengths, default=0) < 0 or sum(lengths) != size[0] * size[1]:
        raise ValueError(f"run lengths of another image than one of {size[1]}x{size[0]}")
    columns: NDArray[np.bool_] = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(size[::-1])
    return columns.T
