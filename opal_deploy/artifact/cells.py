"""The cells of a feature map, and where their boxes lie in images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CellGrid:
    """The cells of a feature map, and the boxes that they stand for in images.

    Attributes:
        rows, cols: H and W of the feature map.
        offset: by how much a box lies right of and below its cell's place in the grid, in cells; a box that would leave
            the image stays at its edge.
    """

    rows: int
    cols: int
    offset: float = 0.0

    def boxes(
        self, crops: Sequence[tuple[int, int, int, int]], rows: NDArray[np.int64], cols: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the boxes (x0, y0, x1, y1) of cells, float64 [N, m, 4], in pixels of the whole oriented images.

        Args:
            crops: of N images, see `Geometry`.
            rows, cols: int64 [N, m], the cells.
        """
        x0, y0, x1, y1 = np.array(crops, np.float64).reshape(-1, 4).T[:, :, None]
        width, height = (x1 - x0) / self.cols, (y1 - y0) / self.rows
        left, top = (
            np.clip(place + self.offset, 0, count - 1) for place, count in ((cols, self.cols), (rows, self.rows))
        )
        return np.stack(
            [x0 + left * width, y0 + top * height, x0 + (left + 1) * width, y0 + (top + 1) * height], axis=2
        )

    def centres(self, crop: tuple[int, int, int, int]) -> NDArray[np.float64]:
        """Return the centres (x, y) of all cells' boxes in the same pixels: float64 [H * W, 2], row-major."""
        rows, cols = np.indices((self.rows, self.cols)).reshape(2, 1, -1)
        x0, y0, x1, y1 = self.boxes([crop], rows, cols)[0].T
        return np.stack([x0 + x1, y0 + y1], axis=1) / 2
