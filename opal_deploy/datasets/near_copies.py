"""Images that are nearly those of the training split: saved again, resized, or the next ones of a burst.

`checks` finds files with the same bytes. These are found by thumbnails, which saving and resizing hardly change.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# training images up to which near copies are looked for: a million thumbnails would take three gigabytes
MAX_IMAGES = 100_000
# side of a thumbnail in pixels, and its length as a vector
_SIDE = 16
THUMBNAIL = 3 * _SIDE * _SIDE
# largest distance, 1 - cosine, of a near copy. Of 543 birds and 372 pets, those saved again, down to JPEG quality 60 at
# 0.3 times the size, had 0.005 at most, different photographs 0.11 at least, but for one pair of near copies
_MAX_DISTANCE = 0.02
# and in shares of the median distance of training images to their nearest: what one fixed camera took is all alike
_MAX_SHARE = 0.05
# training images that the median is taken over, and images that are compared at once
_SAMPLE = 500


def compute_thumbnail(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return an image's thumbnail as a vector of mean 0 and length 1 (all 0 for one colour), float32 [768].

    Args:
        pixels: uint8 [H, W, 3 or more]; channels after the third do not count.
    """
    small = Image.fromarray(pixels[..., :3]).resize((_SIDE, _SIDE), Image.Resampling.BOX)
    vector = np.asarray(small, np.float32).ravel()
    vector = vector - vector.mean()
    length = float(np.linalg.norm(vector))
    scaled: NDArray[np.float32] = vector / max(length, 1e-12)
    return scaled


def find_near_copies(train: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return for each of the other images the training image that it is nearly the same as, int64 [m]; -1: none.

    Args:
        train: thumbnails of the training images, [n, 768].
        others: thumbnails of another split, [m, 768].
    """
    found = np.full(len(others), -1, np.int64)
    if not len(others) or not 2 <= len(train) <= MAX_IMAGES:
        return found
    sample = np.linspace(0, len(train) - 1, min(len(train), _SAMPLE)).astype(np.int64)
    cosines = train[sample] @ train.T
    cosines[np.arange(len(sample)), sample] = -1
    limit = min(_MAX_DISTANCE, _MAX_SHARE * float(np.median(1 - cosines.max(axis=1))))
    for start in range(0, len(others), _SAMPLE):
        cosines = others[start : start + _SAMPLE] @ train.T
        nearest = cosines.argmax(axis=1)
        near = 1 - cosines[np.arange(len(cosines)), nearest] <= limit
        found[start : start + _SAMPLE] = np.where(near, nearest, -1)
    return found
