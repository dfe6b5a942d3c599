"""Perturbed images: the cosine while cells are removed or put back, and the cells while the image hardly changes.

Each fill that removed cells are painted with is unnatural in its own way, so there are three.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from opal_deploy.artifact.heads import find_totals
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.options import Fill
from opal_deploy.evaluation.rankings import Rankings
from opal_deploy.runtime.session import Session

ImageArray = NDArray[np.uint8]

# first words of the seeds of the noise fill and of the noise that stability is measured with
_BASELINE_STREAM, _NOISE_STREAM = 12, 13

FLIP = "horizontal flip"

Change = Callable[[ImageArray, int], ImageArray]
"""Changes an image, given its index in the split."""


class Perturber:
    """Runs images through a session in batches, and counts them."""

    def __init__(self, session: Session, batch: int) -> None:
        self._session, self._batch = session, batch
        self.forward_passes = 0

    def run(self, images: NDArray[np.uint8]) -> Outputs:
        """Return the outputs for images uint8 [n, H0, W0, 3], n at least 1."""
        return Outputs.concatenate(
            [self._run_batch(images[first : first + self._batch]) for first in range(0, len(images), self._batch)]
        )

    def cosines(self, targets: Iterable[tuple[ImageArray, int]]) -> Iterator[tuple[float, bool]]:
        """Yield, for pairs of an image and a class, the class's cosine and whether it is predicted.

        At most a batch of images is held at a time.
        """
        metadata = self._session.metadata
        stream = iter(targets)
        while group := list(itertools.islice(stream, self._batch)):
            outputs = self._run_batch(np.stack([image for image, _ in group]))
            if outputs.scores is None:
                raise ValueError("a model without slots has no cosines")
            values = find_totals(outputs.scores, metadata)
            predicted = outputs.logits.argmax(axis=1)
            for row, (_, class_id) in enumerate(group):
                yield float(values[row, class_id]), bool(predicted[row] == class_id)

    def _run_batch(self, images: NDArray[np.uint8]) -> Outputs:
        self.forward_passes += len(images)
        outputs = self._session.run(images)
        if not np.isfinite(outputs.logits).all():
            raise UsageError(
                "the model's logits for an image with removed cells are not finite numbers; its precision is too low: "
                "export fp32"
            )
        return outputs


def fill_image(image: ImageArray, fill: Fill, grid: tuple[int, int], *, seed: int, index: int) -> ImageArray:
    """Return the image that removed cells are painted from: uint8 [H0, W0, 3].

    `blur`: Gaussian, with a standard deviation of half a cell's smaller side, which keeps a cell's colours but not its
    shapes. `mean`: the image's mean colour. `noise`: normal, with the image's mean and standard deviation per channel;
    depends only on `seed` and the image's `index`.
    """
    if fill == "blur":
        radius = min(image.shape[0] / grid[0], image.shape[1] / grid[1]) / 2
        return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)), np.uint8)
    mean = image.mean(axis=(0, 1))
    if fill == "mean":
        return np.full_like(image, np.rint(mean).astype(np.uint8))
    drawn = np.random.default_rng((_BASELINE_STREAM, seed, index)).standard_normal(image.shape)
    noise: ImageArray = np.rint(mean + image.std(axis=(0, 1)) * drawn).clip(0, 255).astype(np.uint8)
    return noise


def replace_cells(
    image: ImageArray, replacement: ImageArray, cells: frozenset[int], grid: tuple[int, int]
) -> ImageArray:
    """Return `image` with the rectangles of `cells` (flat row-major in `grid`) taken from `replacement`."""
    rows, cols = grid
    y, x = find_edges((image.shape[0], image.shape[1]), grid)
    if len(cells) == rows * cols:
        return replacement
    changed = image.copy()
    for cell in cells:
        row, col = divmod(cell, cols)
        rectangle = (slice(y[row], y[row + 1]), slice(x[col], x[col + 1]))
        changed[rectangle] = replacement[rectangle]
    return changed


def find_edges(size: tuple[int, int], grid: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges of the cells of a grid (H, W) in an input (H0, W0): rows int64 [H + 1], columns [W + 1]."""
    y, x = (np.rint(np.linspace(0, length, n + 1)).astype(np.int64) for length, n in zip(size, grid, strict=True))
    return y, x


@dataclass(frozen=True)
class Curve:
    """The deletion and insertion curves of one image, one fill and one ranking.

    Attributes:
        deletion: float64 [k + 1], cosine with the first 0, 1, ..., k cells removed.
        insertion: float64 [k + 1], cosine with nothing but the first 0, 1, ..., k cells.
        class_kept: whether the class is still predicted with all k cells removed.
        evidence_share: share of the k cells that are evidence, 0 ... 1.
    """

    deletion: NDArray[np.float64]
    insertion: NDArray[np.float64]
    class_kept: bool
    evidence_share: float

    @property
    def steps(self) -> int:
        """The number of cells removed, k."""
        return len(self.deletion) - 1

    def first(self, steps: int) -> Curve:
        """Return the curve cut after `steps` cells; `class_kept` and `evidence_share` still describe all of it."""
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


Curves = dict[tuple[Fill, str], Curve]
"""The curves of one image by fill and ranking."""


def perturbation_curves(
    perturber: Perturber,
    images: NDArray[np.uint8],
    rankings: Sequence[Rankings],
    indices: Sequence[int],
    grid: tuple[int, int],
    fills: Sequence[Fill],
    seed: int,
) -> list[Curves]:
    """Return the curves of every ranking with every fill for n images; equal sets of removed cells run once.

    Args:
        images: uint8 [n, H0, W0, 3].
        seed: of the noise fill, 0 or more.
    """
    every = frozenset(range(grid[0] * grid[1]))
    steps = [
        (number, fill, removed)
        for number, ranking in enumerate(rankings)
        for fill in fills
        for removed in dict.fromkeys(
            removed
            for cells in ranking.cells.values()
            for k in range(len(cells) + 1)
            # an unchanged image is the same for every fill
            for removed in (frozenset(cells[:k]), every.difference(cells[:k]))
        )
        if removed or fill == fills[0]
    ]

    def perturbed() -> Iterator[tuple[ImageArray, int]]:
        current, replacement = None, images[0]
        for number, fill, removed in steps:
            if (number, fill) != current:
                current = (number, fill)
                replacement = fill_image(images[number], fill, grid, seed=seed, index=indices[number])
            yield replace_cells(images[number], replacement, removed, grid), rankings[number].predicted

    results = dict(zip(steps, perturber.cosines(perturbed()), strict=True))

    def look_up(number: int, fill: Fill, removed: frozenset[int]) -> tuple[float, bool]:
        return results[number, fill if removed else fills[0], removed]

    def build_curve(number: int, fill: Fill, cells: tuple[int, ...]) -> Curve:
        deleted = [look_up(number, fill, frozenset(cells[:k])) for k in range(len(cells) + 1)]
        inserted = [look_up(number, fill, every.difference(cells[:k])) for k in range(len(cells) + 1)]
        deletion, insertion = (np.array([cosine for cosine, _ in found]) for found in (deleted, inserted))
        share = len(set(rankings[number].evidence).intersection(cells)) / len(cells)
        return Curve(deletion, insertion, deleted[-1][1], share)

    return [
        {(fill, name): build_curve(number, fill, cells) for fill in fills for name, cells in ranking.cells.items()}
        for number, ranking in enumerate(rankings)
    ]


@dataclass(frozen=True)
class SlotStability:
    """One image under one change. Shares are of the m slots of the class predicted for the unchanged image.

    Attributes:
        same_cell: share of slots with the same cell; after a flip, the cell nearest to the mirrored one's centre.
        within_one_cell: share of slots with the same cell or one of its eight neighbours.
    """

    same_cell: float
    within_one_cell: float
    same_class: bool


def image_changes(seed: int) -> dict[str, Change]:
    """Return the changes of the model's input by name; noise depends only on `seed` and the image's index."""
    return {
        "JPEG quality 90": lambda image, _: _compress_jpeg(image, 90),
        "JPEG quality 75": lambda image, _: _compress_jpeg(image, 75),
        "JPEG quality 50": lambda image, _: _compress_jpeg(image, 50),
        "resize by a pixel": lambda image, _: _resize_by_a_pixel(image),
        "noise, 2 counts": lambda image, index: _add_noise(image, 2.0, seed, index),
        "noise, 5 counts": lambda image, index: _add_noise(image, 5.0, seed, index),
        FLIP: lambda image, _: image[:, ::-1],
    }


def measure_stability(
    perturber: Perturber,
    images: NDArray[np.uint8],
    unchanged: Outputs,
    indices: Sequence[int],
    metadata: Metadata,
    seed: int,
    center: float = 0.5,
) -> list[dict[str, SlotStability]]:
    """Return the stability of n images under every change, by name.

    Args:
        images: uint8 [n, H0, W0, 3].
        center: centre of a cell's receptive field, in cells from the corner of its box (0.5: the box's own centre).
    """
    stabilities: list[dict[str, SlotStability]] = [{} for _ in images]
    for name, change in image_changes(seed).items():
        changed = np.stack([change(image, index) for image, index in zip(images, indices, strict=True)])
        outputs = perturber.run(changed)
        for row, by_change in enumerate(stabilities):
            by_change[name] = _compare(unchanged, outputs, row, metadata, center if name == FLIP else None)
    return stabilities


def _compare(
    before: Outputs, after: Outputs, row: int, metadata: Metadata, mirrored_center: float | None
) -> SlotStability:
    if before.argmax is None or after.argmax is None:
        raise ValueError("a model without slots has no cells")
    width = metadata.grid[1]
    predicted = int(before.logits[row].argmax())
    block = metadata.class_map.channels(predicted)
    (old_row, old_col), (new_row, new_col) = (
        divmod(cells[row, block], width) for cells in (before.argmax, after.argmax)
    )
    if mirrored_center is not None:
        old_col = np.rint(width - 2 * mirrored_center - old_col).clip(0, width - 1)
    distance = np.maximum(np.abs(new_row - old_row), np.abs(new_col - old_col))
    return SlotStability(
        float((distance == 0).mean()), float((distance <= 1).mean()), int(after.logits[row].argmax()) == predicted
    )


def _compress_jpeg(image: ImageArray, quality: int) -> ImageArray:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream).convert("RGB"))


def _resize_by_a_pixel(image: ImageArray) -> ImageArray:
    """Return the image resized to one pixel more each way, and back."""
    height, width = image.shape[:2]
    larger = Image.fromarray(image).resize((width + 1, height + 1), Image.Resampling.BILINEAR)
    return np.asarray(larger.resize((width, height), Image.Resampling.BILINEAR))


def _add_noise(image: ImageArray, sigma: float, seed: int, index: int) -> ImageArray:
    # the same noise at every strength
    drawn = np.random.default_rng((_NOISE_STREAM, seed, index)).standard_normal(image.shape)
    return np.rint(image + sigma * drawn).clip(0, 255).astype(np.uint8)
