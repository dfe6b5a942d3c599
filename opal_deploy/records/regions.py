"""Regions of an image that speak for a class: neighbouring strong cells, from each cell's exact share of a logit.

The strong cells are the fewest, the largest shares first, that hold half of all that speaks for the class. Those that
touch at a side are one region; regions are ordered by their sums, and at most five are listed. What they leave out,
cells that speak against the class among it, is the record's `rest`: regions, rest and bias add up to the logit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# regions of a record
MOST_REGIONS = 5
_HALF = 0.5


class Region(NamedTuple):
    """A region: its strongest cell, the share of that, the sum of all its cells, and (row, col) from and up to them."""

    cell: tuple[int, int]
    share: float
    total: float
    first: tuple[int, int]
    last: tuple[int, int]


def find_strong_cells(shares: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the flat indices of the strong cells of shares in any shape, the largest share first; at least one."""
    order = np.argsort(-shares, axis=None, kind="stable")
    reached = np.cumsum(np.clip(shares.ravel()[order], 0.0, None))
    count = int(np.searchsorted(reached, _HALF * reached[-1])) + 1 if reached[-1] > 0 else 1
    return order[:count]


def find_regions(shares: NDArray[np.floating]) -> list[Region]:
    """Return the regions of a map of shares [H, W], the largest sum first; at least one."""
    exact = shares.astype(np.float64)
    left = {divmod(cell, exact.shape[1]) for cell in find_strong_cells(exact).tolist()}
    regions = []
    while left:
        pending, cells = [left.pop()], []
        while pending:
            row, col = cell = pending.pop()
            cells.append(cell)
            for near in ((row - 1, col), (row + 1, col), (row, col - 1), (row, col + 1)):
                if near in left:
                    left.remove(near)
                    pending.append(near)
        # the first of equal cells, so that the order of the search does not matter
        peak = min(cells, key=lambda cell: (-exact[cell], cell))
        rows, cols = zip(*cells, strict=True)
        total = float(exact[np.array(rows), np.array(cols)].sum())
        regions.append(Region(peak, float(exact[peak]), total, (min(rows), min(cols)), (max(rows), max(cols))))
    return sorted(regions, key=lambda region: (-region.total, region.cell))[:MOST_REGIONS]
