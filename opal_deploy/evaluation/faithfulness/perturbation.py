"""Deletion and insertion: the cosine of the predicted class while cells are removed from an image, or put back.

Each baseline that removed cells are painted with is unnatural in its own way, so three are offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from opal_deploy.artifact.outputs import Outputs, cosines
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.faithfulness.rankings import Rankings
from opal_deploy.runtime.session import Session


class Perturber:
    """Runs images through a session in batches, and counts them.

    Attributes:
        passes: forward passes, counted in images.
    """

    def __init__(self, session: Session, batch: int) -> None:
        self._session, self._batch = session, batch
        self.passes = 0

    def run(self, images: NDArray[np.uint8]) -> Outputs:
        """Return the outputs for images uint8 [n, H0, W0, 3], n at least 1."""
        return Outputs.concatenate(
            [self._once(images[first : first + self._batch]) for first in range(0, len(images), self._batch)]
        )

    def cosines(self, wanted: Iterable[tuple[ImageArray, int]]) -> Iterator[tuple[float, bool]]:
        """Yield, for pairs of an image and a class, the class's cosine and whether it is predicted.

        At most a batch of images is held at a time.
        """
        metadata = self._session.metadata
        stream = iter(wanted)
        while group := list(itertools.islice(stream, self._batch)):
            outputs = self._once(np.stack([image for image, _ in group]))
            if outputs.scores is None:
                raise ValueError("a model without slots has no cosines")
            found = cosines(outputs.scores, metadata.prototypes_per_class, metadata.epsilon)
            answers = outputs.logits.argmax(axis=1)
            for row, (_, class_id) in enumerate(group):
                yield float(found[row, class_id]), bool(answers[row] == class_id)

    def _once(self, images: NDArray[np.uint8]) -> Outputs:
        self.passes += len(images)
        outputs = self._session.run(images)
        if not np.isfinite(outputs.logits).all():
            raise UsageError(
                "its logits for an image with cells taken away are not finite numbers, so its faithfulness cannot be "
                "measured; its precision is too low, export fp32"
            )
        return outputs


Baseline = Literal["blur", "mean", "noise"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)

ImageArray = NDArray[np.uint8]

_STREAM = 12


def baseline_image(image: ImageArray, fill: Baseline, grid: tuple[int, int], *, seed: int, index: int) -> ImageArray:
    """Return the image that removed cells are taken from: uint8 [H0, W0, 3].

    `blur`: Gaussian, with a standard deviation of half a cell's smaller side: a cell's colours stay, its shapes go.
    `mean`: the image's mean colour. `noise`: normal, of the image's mean and standard deviation in each channel; it
    depends on `seed` and `index`, the image's number, only.
    """
    if fill == "blur":
        radius = min(image.shape[0] / grid[0], image.shape[1] / grid[1]) / 2
        return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)), np.uint8)
    mean = image.mean(axis=(0, 1))
    if fill == "mean":
        return np.full_like(image, np.rint(mean).astype(np.uint8))
    drawn = np.random.default_rng((_STREAM, seed, index)).standard_normal(image.shape)
    noise: ImageArray = np.rint(mean + image.std(axis=(0, 1)) * drawn).clip(0, 255).astype(np.uint8)
    return noise


def replace_cells(image: ImageArray, paint: ImageArray, cells: frozenset[int], grid: tuple[int, int]) -> ImageArray:
    """Return `image` with the rectangles of `cells` (flat row-major in `grid`) taken from `paint`."""
    rows, cols = grid
    y, x = (np.rint(np.linspace(0, length, n + 1)).astype(int) for length, n in zip(image.shape, grid, strict=False))
    if len(cells) == rows * cols:
        return paint
    changed = image.copy()
    for cell in cells:
        row, col = divmod(cell, cols)
        trapezoid_area = (slice(y[row], y[row + 1]), slice(x[col], x[col + 1]))
        changed[trapezoid_area] = paint[trapezoid_area]
    return changed


@dataclass(frozen=True)
class Curve:
    """The deletion and insertion curves of one image, one baseline and one ranking.

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
        """The number of cells removed, k."""
        return len(self.deletion) - 1

    def first(self, steps: int) -> Curve:
        """Return the curve cut after `steps` cells; `kept` and `overlap` stay those of the whole curve."""
        return replace(self, deletion=self.deletion[: steps + 1], insertion=self.insertion[: steps + 1])

    @property
    def drop(self) -> float:
        """The drop of the cosine with all k cells removed."""
        return float(self.deletion[0] - self.deletion[-1])

    @property
    def deletion_area(self) -> float:
        """The mean cosine from no cell to k cells removed; small if the first cells matter most."""
        return trapezoid_area(self.deletion)

    @property
    def insertion_area(self) -> float:
        """The mean cosine from no cell to k cells put back; large if the first cells matter most."""
        return trapezoid_area(self.insertion)


def trapezoid_area(curve: NDArray[np.float64]) -> float:
    """Return the area under a curve float64 [k + 1] over 0 ... 1 by the trapezoidal rule, k at least 1."""
    return float((curve[:-1] + curve[1:]).mean() / 2)


# of one image: (fill, order) to what happened
Curves = dict[tuple[Baseline, str], Curve]


def perturbation_curves(
    runner: Perturber,
    images: NDArray[np.uint8],
    orders: Sequence[Rankings],
    indices: Sequence[int],
    grid: tuple[int, int],
    fills: Sequence[Baseline],
    seed: int,
) -> list[Curves]:
    """Return the curves of every ranking with every baseline for n images; equal sets of removed cells run once.

    Args:
        runner: the model.
        images: uint8 [n, H0, W0, 3].
        orders: of each.
        indices: the images' numbers in their data set.
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

    def changed() -> Iterator[tuple[ImageArray, int]]:
        painted, paint = None, images[0]
        for number, fill, removed in steps:
            if (number, fill) != painted:
                painted = (number, fill)
                paint = baseline_image(images[number], fill, grid, seed=seed, index=indices[number])
            yield replace_cells(images[number], paint, removed, grid), orders[number].predicted

    answers = dict(zip(steps, runner.cosines(changed()), strict=True))

    def answer(number: int, fill: Baseline, removed: frozenset[int]) -> tuple[float, bool]:
        return answers[number, fill if removed else fills[0], removed]

    found: list[Curves] = []
    for number, order in enumerate(orders):
        evidence = set(order.evidence)
        curves_of_image: Curves = {}
        for fill in fills:
            for name, cells in order.cells.items():
                deleted = [answer(number, fill, frozenset(cells[:k])) for k in range(len(cells) + 1)]
                inserted = [answer(number, fill, every.difference(cells[:k])) for k in range(len(cells) + 1)]
                curves_of_image[fill, name] = Curve(
                    np.array([cosine for cosine, _ in deleted]),
                    np.array([cosine for cosine, _ in inserted]),
                    deleted[-1][1],
                    len(evidence.intersection(cells)) / len(cells),
                )
        found.append(curves_of_image)
    return found
