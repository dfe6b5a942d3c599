"""From a picture to a model's input: crop to a box if there is one, squash to H0 x W0, normalise.

As the paper's authors evaluate: straight to the input size, aspect ratio not kept, antialiased bilinear (Pillow's, or
the same arithmetic of a faster library, see `native`). The crop comes first, so that pixels outside the box do not
bleed in at its edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.preprocess import native
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.preprocess.geometry import Geometry

Box = tuple[float, float, float, float]


def compute_geometry(image: Image.Image, box: Box | None = None) -> Geometry:
    """Where the model will look on this picture.

    Args:
        image: the whole picture, oriented.
        box: (x0, y0, x1, y1) in its pixels, x1 and y1 exclusive. Truncated to integers as the authors do, then cut to
            the picture's edges.

    Raises:
        ImageError: bad_box, if no pixel is left.
    """
    return compute_geometry_from_size(image.size, box)


def compute_geometry_from_size(size: tuple[int, int], box: Box | None = None) -> Geometry:
    """`lay_out` of an oriented picture of which only its (width, height) is known."""
    width, height = size
    if box is None:
        return Geometry.whole(width, height)
    if not all(np.isfinite(box)):
        raise ImageError("bad_box", f"box {_shown(box)} is not four finite numbers")
    x0, y0, x1, y1 = (int(value) for value in box)
    crop = (max(x0, 0), max(y0, 0), min(x1, width), min(y1, height))
    if crop[0] >= crop[2] or crop[1] >= crop[3]:
        raise ImageError("bad_box", f"box {_shown(box)} has no pixel of the {width}x{height} picture")
    return Geometry(width, height, crop)


def to_input(
    image: Image.Image, geometry: Geometry, input_size: tuple[int, int], decoding: Decoding = Decoding.default
) -> NDArray[np.uint8]:
    """uint8 [H0, W0, 3], RGB: the crop of `image` squashed to `input_size` = (H0, W0).

    An `image` that `decode_for` made smaller stands for the whole picture, and has no crop. With `exact`, Pillow
    resizes.
    """
    height, width = input_size
    region = image
    if geometry.crop != (0, 0, geometry.width, geometry.height):
        region = image.crop(geometry.crop)
    if decoding is not Decoding.exact:
        squashed = native.resize(region, (width, height))
        if squashed is not None:
            return squashed
    return np.asarray(region.resize((width, height), Image.Resampling.BILINEAR))


def normalise(images: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """uint8 [N, H0, W0, 3] to float32 [N, 3, H0, W0]: (v / 255 - mean) / std, channel by channel."""
    scaled = images.astype(np.float32) / np.float32(255.0)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))


def _shown(box: Box) -> str:
    return "(" + ", ".join(f"{value:g}" for value in box) + ")"
