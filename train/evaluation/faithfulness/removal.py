"""Deletion and insertion: the predicted class's cosine while cells are taken from a picture, or put back into none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from opal_deploy.train.evaluation.faithfulness.fills import Fill, Picture, filled, without
from opal_deploy.train.evaluation.faithfulness.orders import Orders
from opal_deploy.train.evaluation.faithfulness.runner import Runner


@dataclass(frozen=True)
class Path:
    """One picture, one fill, one order: what happened at each step.

    Attributes:
        deletion: float64 [k + 1], cosine with the first 0, 1, ..., k cells removed.
        insertion: float64 [k + 1], cosine with nothing but the first 0, 1, ..., k cells.
        kept: whether the class is still the answer with all k cells removed.
        overlap: share of the k cells that are evidence, 0 ... 1.
    """

    deletion: NDArray[np.float64]
    insertion: NDArray[np.float64]
    kept: bool
    overlap: float

    @property
    def steps(self) -> int:
        """k, how many cells were removed."""
        return len(self.deletion) - 1

    def first(self, steps: int) -> Path:
        """The same way, ended after so many of its cells; `kept` and `overlap` are those of its end."""
        return replace(self, deletion=self.deletion[: steps + 1], insertion=self.insertion[: steps + 1])

    @property
    def drop(self) -> float:
        """How far the cosine fell with all k cells removed."""
        return float(self.deletion[0] - self.deletion[-1])

    @property
    def deletion_area(self) -> float:
        """Mean cosine on the way from no cell to k cells removed: small where the first cells matter most."""
        return area(self.deletion)

    @property
    def insertion_area(self) -> float:
        """Mean cosine on the way from no cell to k cells put back: large where the first cells matter most."""
        return area(self.insertion)


def area(curve: NDArray[np.float64]) -> float:
    """By trapezoids over 0 ... 1, whatever the number of steps [k + 1], k at least 1."""
    return float((curve[:-1] + curve[1:]).mean() / 2)


# of one picture: (fill, order) to what happened
Paths = dict[tuple[Fill, str], Path]


def paths(
    runner: Runner,
    pictures: NDArray[np.uint8],
    orders: Sequence[Orders],
    indices: Sequence[int],
    grid: tuple[int, int],
    fills: Sequence[Fill],
    seed: int,
) -> list[Paths]:
    """Every order with every fill, for n pictures. A set of removed cells is run once, whichever orders lead to it.

    Args:
        runner: the model.
        pictures: uint8 [n, H0, W0, 3].
        orders: of each.
        indices: the pictures' numbers in their data set.
        grid: (H, W).
        fills, seed: see `fills`.
    """
    every = frozenset(range(grid[0] * grid[1]))
    steps = [
        (number, fill, removed)
        for number, order in enumerate(orders)
        for fill in fills
        for removed in dict.fromkeys(
            removed
            for cells in order.cells.values()
            for k in range(len(cells) + 1)
            # nothing removed is one and the same with every fill
            for removed in (frozenset(cells[:k]), every.difference(cells[:k]))
        )
        if removed or fill == fills[0]
    ]

    def changed() -> Iterator[tuple[Picture, int]]:
        painted, paint = None, pictures[0]
        for number, fill, removed in steps:
            if (number, fill) != painted:
                painted = (number, fill)
                paint = filled(pictures[number], fill, grid, seed=seed, index=indices[number])
            yield without(pictures[number], paint, removed, grid), orders[number].predicted

    answers = dict(zip(steps, runner.cosines(changed()), strict=True))

    def answer(number: int, fill: Fill, removed: frozenset[int]) -> tuple[float, bool]:
        return answers[number, fill if removed else fills[0], removed]

    found: list[Paths] = []
    for number, order in enumerate(orders):
        evidence = set(order.evidence)
        of_picture: Paths = {}
        for fill in fills:
            for name, cells in order.cells.items():
                deleted = [answer(number, fill, frozenset(cells[:k])) for k in range(len(cells) + 1)]
                inserted = [answer(number, fill, every.difference(cells[:k])) for k in range(len(cells) + 1)]
                of_picture[fill, name] = Path(
                    np.array([cosine for cosine, _ in deleted]),
                    np.array([cosine for cosine, _ in inserted]),
                    deleted[-1][1],
                    len(evidence.intersection(cells)) / len(cells),
                )
        found.append(of_picture)
    return found
