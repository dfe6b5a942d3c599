"""What a removed cell is painted over with. Each has its own way of being unnatural, so three are offered."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

Fill = Literal["blur", "mean", "noise"]
FILLS: tuple[Fill, ...] = get_args(Fill)

Picture = NDArray[np.uint8]

_STREAM = 12


def filled(picture: Picture, fill: Fill, grid: tuple[int, int], *, seed: int, index: int) -> Picture:
    """The whole picture as `fill` has it, of which removed cells take their part: uint8 [H0, W0, 3].

    `blur`: Gaussian, with a standard deviation of half a cell's smaller side: a cell's colours stay, its shapes go.
    `mean`: the picture's mean colour. `noise`: normal, of the picture's mean and standard deviation in each channel; it
    depends on `seed` and `index`, the picture's number, only.
    """
    if fill == "blur":
        radius = min(picture.shape[0] / grid[0], picture.shape[1] / grid[1]) / 2
        return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(radius)), np.uint8)
    mean = picture.mean(axis=(0, 1))
    if fill == "mean":
        return np.full_like(picture, np.rint(mean).astype(np.uint8))
    drawn = np.random.default_rng((_STREAM, seed, index)).standard_normal(picture.shape)
    noise: Picture = np.rint(mean + picture.std(axis=(0, 1)) * drawn).clip(0, 255).astype(np.uint8)
    return noise


def without(picture: Picture, paint: Picture, cells: frozenset[int], grid: tuple[int, int]) -> Picture:
    """`picture` with the rectangles of `cells`, flat row-major in `grid`, as in `paint`; all cells give `paint`."""
    rows, cols = grid
    y, x = (np.rint(np.linspace(0, length, n + 1)).astype(int) for length, n in zip(picture.shape, grid, strict=False))
    if len(cells) == rows * cols:
        return paint
    changed = picture.copy()
    for cell in cells:
        row, col = divmod(cell, cols)
        area = (slice(y[row], y[row + 1]), slice(x[col], x[col + 1]))
        changed[area] = paint[area]
    return changed
