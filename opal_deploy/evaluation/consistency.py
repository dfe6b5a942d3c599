"""Prototype consistency and stability, by the protocol of Huang et al. 2023 (paper, Supp. E.3).

An image is cropped to its box and squashed to 224 x 224. Each of the m attention maps of its true class is upsampled
to 224 x 224, and the region that the prototype looks at is the square around the maximum of that *upsampled* map. It is
not the square around the centre of the strongest cell: the two differ, since bicubic interpolation moves the maximum
towards strong neighbours. A part is hit if it is visible and inside the region. All fifteen parts count, left and right
apart.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.artifact.outputs import FloatArray

HALF_REGION = 36
"""Pixels of the 224 x 224 input from a region's centre to its edge."""

CONSISTENT = 0.8
"""The least share of images on which a consistent prototype hits one and the same part."""

NOISE_STD, NOISE_LIMIT = 0.2, 0.25
"""Standard deviation and largest amount of the noise, added to normalised images."""

# first word of the seeds: a stream of its own
_STREAM = 2


def true_class_maps(attention: FloatArray, labels: NDArray[np.int64], prototypes_per_class: int) -> NDArray[np.float32]:
    """Return the maps of the true classes, float32 [N, m, H, W], of attention [N, K, H, W] and labels [N]."""
    channels = labels[:, None] * prototypes_per_class + np.arange(prototypes_per_class)  # [N, m]
    chosen: NDArray[np.float32] = attention[np.arange(len(labels))[:, None], channels]
    return chosen


def upsample(maps: NDArray[np.float32], size: int = 224) -> NDArray[np.float32]:
    """Upsample maps float32 [N, m, H, W] to [N, m, size, size], bicubic as OpenCV's INTER_CUBIC.

    That is a = -0.75, half-pixel centres, the border replicated.
    """
    larger: NDArray[np.float32] = torch.nn.functional.interpolate(
        torch.from_numpy(maps), size=(size, size), mode="bicubic", align_corners=False
    ).numpy()
    return larger


def peak_locations(maps: NDArray[np.float32], size: int = 224) -> NDArray[np.int64]:
    """Return the maximum (y, x) of each upsampled map, int64 [N, m, 2]; of equal ones the first, row-major.

    Args:
        maps: float32 [N, m, H, W].
        size: in pixels.
    """
    # numpy's argmax promises the first of equal maxima
    flat = upsample(maps, size).reshape(*maps.shape[:2], -1).argmax(axis=2)
    return np.stack([flat // size, flat % size], axis=2)


def part_hits(
    centres: NDArray[np.int64],
    points: NDArray[np.int64],
    visible: NDArray[np.bool_],
    size: int = 224,
) -> NDArray[np.bool_]:
    """Return whether a visible part lies in a prototype's region, edges included: bool [N, m, P].

    Args:
        centres: [N, m, 2], (y, x), see `peak_locations`.
        points: [N, P, 2], (x, y) of the parts; may lie outside the image.
        visible: [N, P].
        size: of the image; regions end at 0 and at `size`.
    """
    low = np.maximum(centres - HALF_REGION, 0)[:, :, None]  # [N, m, 1, 2]
    high = np.minimum(centres + HALF_REGION, size)[:, :, None]
    where = points[:, None, :, ::-1]  # [N, 1, P, 2], (y, x)
    inside = ((where >= low) & (where <= high)).all(axis=3)
    hits: NDArray[np.bool_] = inside & visible[:, None]
    return hits


def consistency(hit: NDArray[np.bool_], visible: NDArray[np.bool_], labels: NDArray[np.int64]) -> float:
    """Return the percentage, 0 ... 100, of prototypes that hit one part on at least 80 % of their class's images.

    A part counts over the images on which it is visible; a part that is never visible is never hit. Classes without
    images do not count.

    Args:
        hit: [N, m, P], on each image the prototypes of its own class.
        visible: [N, P].
        labels: [N].
    """
    scores: list[NDArray[np.bool_]] = []
    for label in np.unique(labels):
        of_class = labels == label
        seen = np.maximum(visible[of_class].sum(axis=0), 1)  # [P]; 0 of 0 is 0
        shares = hit[of_class].sum(axis=0) / seen  # [m, P]
        scores.append((shares >= CONSISTENT).any(axis=1))
    consistent = np.concatenate(scores)
    return 100.0 * int(consistent.sum()) / len(consistent)


def stability(clean: NDArray[np.bool_], noisy: NDArray[np.bool_], labels: NDArray[np.int64]) -> float:
    """Return the mean percentage, 0 ... 100, of images on which noise changes none of a prototype's hits.

    Args:
        clean, noisy: [N, m, P], hits without and with noise; on each image the prototypes of its own class.
        labels: [N].
    """
    same = (clean == noisy).all(axis=2)  # [N, m]
    shares = [same[labels == label].mean(axis=0) for label in np.unique(labels)]
    return 100.0 * float(np.concatenate(shares).mean())


def add_noise(images: FloatArray, first: int, seed: int) -> FloatArray:
    """Return `images` plus noise from N(0, 0.2), clipped to +-0.25.

    Args:
        images: float32 [N, 3, H0, W0], normalised.
        first: number of the first image within the data set: an image's noise depends on seed and number alone, not
            on the batch that it is in.
        seed: 0 or more.
    """
    noisy = np.empty_like(images)
    for offset, image in enumerate(images):
        noise = np.random.default_rng((_STREAM, seed, first + offset)).standard_normal(image.shape, dtype=np.float32)
        noisy[offset] = image + np.clip(np.float32(NOISE_STD) * noise, -NOISE_LIMIT, NOISE_LIMIT)
    return noisy
