"""Where a cell of the feature map lies on the picture that a viewer shows: the exact inverse of the preprocessing.

A picture is oriented (EXIF), cropped to a box if one is given, and squashed to H0 x W0. All three steps are
axis-aligned and linear, so a cell (row, col) of the H x W grid is a rectangle of the oriented picture:
`x = x0 + col / W * (x1 - x0)`, `y = y0 + row / H * (y1 - y0)` (paper, Sec. 3.4: linear rescaling).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """How one picture was laid out before it was resized.

    Attributes:
        width, height: of the whole picture in pixels, EXIF orientation applied.
        crop: (x0, y0, x1, y1), integer pixels of that picture, x1 and y1 exclusive; the whole picture without a box.
    """

    width: int
    height: int
    crop: tuple[int, int, int, int]

    @staticmethod
    def whole(width: int, height: int) -> Geometry:
        """No crop."""
        return Geometry(width, height, (0, 0, width, height))

    def cell_box(self, row: int, col: int, grid: tuple[int, int]) -> tuple[float, float, float, float]:
        """The rectangle (x0, y0, x1, y1) of a cell, in pixels of the whole oriented picture."""
        rows, cols = grid
        x0, y0, x1, y1 = self.crop
        cell_width, cell_height = (x1 - x0) / cols, (y1 - y0) / rows
        return (
            x0 + col * cell_width,
            y0 + row * cell_height,
            x0 + (col + 1) * cell_width,
            y0 + (row + 1) * cell_height,
        )
