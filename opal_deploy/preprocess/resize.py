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

from opal_deploy.preprocess import accelerated
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.preprocess.geometry import Geometry


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
        squashed = accelerated.resize(region, (width, height))
        if squashed is not None:
            return squashed
    return np.asarray(region.resize((width, height), Image.Resampling.BILINEAR))


def normalise(images: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """uint8 [N, H0, W0, 3] to float32 [N, 3, H0, W0]: (v / 255 - mean) / std, channel by channel."""
    scaled = images.astype(np.float32) / np.float32(255.0)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))
