"""Part purity, as PIP-Net defines it (Nauta et al. 2023): do a channel's best pictures show one and the same part?

For each channel the ten pictures with its highest scores are taken, of whatever class, and on each the 32 x 32 patch of
its strongest cell. The channel's purity is the largest share, over parts, of those pictures whose patch holds the part.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.outputs import FloatArray, IntArray

# pictures a channel is judged by
TOP = 10
# pixels of the 224 x 224 input
PATCH = 32

_SIDES = ("left ", "right ")


def merge_sides(
    names: tuple[str, ...], present: NDArray[np.bool_], visible: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """`left X` and `right X` as one part X: there if either is, visible if either is.

    Args:
        names: P names.
        present, visible: [..., P].

    Returns:
        present, visible: [..., Q], Q parts in the order of their first mention.
    """
    whole = [name.removeprefix(_SIDES[0]).removeprefix(_SIDES[1]) for name in names]
    groups = [[i for i, other in enumerate(whole) if other == name] for name in dict.fromkeys(whole)]
    merged = [np.stack([array[..., group].any(axis=-1) for group in groups], axis=-1) for array in (present, visible)]
    return merged[0], merged[1]


def patches(cells: NDArray[np.integer], grid: tuple[int, int], size: int = 224) -> NDArray[np.int64]:
    """int64 [..., 4], (x0, y0, x1, y1) in pixels of the size x size input, PATCH on a side, from flat cells [...].

    The patches are spread evenly; those of the last row and column end at the picture's edge.
    """
    bounds = []
    for index, count in ((cells % grid[1], grid[1]), (cells // grid[1], grid[0])):
        step = round((size - PATCH) / max(count - 1, 1))
        low = np.where(index == count - 1, size - PATCH, index * step)
        bounds.append((low, np.minimum(low + PATCH, size)))
    (x0, x1), (y0, y1) = bounds
    return np.stack([x0, y0, x1, y1], axis=-1).astype(np.int64)


def purity_by_channel(
    scores: FloatArray,
    argmax: IntArray,
    grid: tuple[int, int],
    points: NDArray[np.float64],
    visible: NDArray[np.bool_],
    names: tuple[str, ...],
    size: int = 224,
) -> NDArray[np.float64]:
    """Purities float64 [K], 0 ... 1; 0 where no part is visible on any of the channel's pictures.

    Args:
        scores: [N, K]; of equal ones the earlier picture comes first.
        argmax: [N, K], flat cell of each channel's maximum.
        grid: (H, W) that `argmax` counts in.
        points: [N, P, 2], (x, y) in pixels of the size x size input, not rounded.
        visible: [N, P].
        names: P names of the parts.
        size: of the input.
    """
    best = np.argsort(-scores, axis=0, kind="stable")[:TOP]  # [T, K]
    boxes = patches(np.take_along_axis(argmax, best, axis=0), grid, size)[:, :, None]  # [T, K, 1, 4]
    where = points[best]  # [T, K, P, 2]
    inside = ((where >= boxes[..., :2]) & (where <= boxes[..., 2:])).all(axis=3)
    present, seen = merge_sides(names, inside & visible[best], visible[best])  # [T, K, Q]
    shares = present.sum(axis=0) / np.maximum(seen.sum(axis=0), 1)  # [K, Q]
    purities: NDArray[np.float64] = shares.max(axis=1)
    return purities
