"""Stability of cells: whether a slot's argmax stays when the image hardly changes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.evaluation.faithfulness.perturbation import ImageArray, Perturber

FLIP = "horizontal flip"

# first word of the seeds: a stream of its own
_STREAM = 13

Change = Callable[[ImageArray, int], ImageArray]
"""Changes an image, given its index in the data set."""


@dataclass(frozen=True)
class SlotStability:
    """One image under one change. Shares are of the m slots of the class predicted for the unchanged image.

    Attributes:
        same_cell: share of slots whose cell is the same; after a flip: the one whose centre is nearest to the mirrored
            centre of the cell before.
        within_one_cell: share of slots whose cell is the same or one of its neighbours, diagonal ones included.
        same_class: whether the predicted class is the same.
    """

    same_cell: float
    within_one_cell: float
    same_class: bool


def image_changes(seed: int) -> dict[str, Change]:
    """Return the changes of the model's input by name; noise depends on `seed` and the image's index only."""
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
        perturber: of the model.
        images: uint8 [n, H0, W0, 3].
        unchanged: the model's outputs for `images`.
        indices: of the images in their data set.
        metadata: of the model.
        seed: of the noise.
        center: of what a cell sees, in cells from the corner of its box, whose own centre is 0.5.
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
    m, width = metadata.prototypes_per_class, metadata.grid[1]
    predicted = int(before.logits[row].argmax())
    block = slice(predicted * m, (predicted + 1) * m)
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
    drawn = np.random.default_rng((_STREAM, seed, index)).standard_normal(image.shape)
    return np.rint(image + sigma * drawn).clip(0, 255).astype(np.uint8)
