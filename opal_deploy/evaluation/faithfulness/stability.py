"""Do the cells stay where they are when the picture hardly changes?"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.evaluation.faithfulness.perturbation import Perturber, Picture

FLIP = "horizontal flip"

_STREAM = 13


@dataclass(frozen=True)
class Kept:
    """One picture, one change. Shares are of the m slots of the class that the untouched picture is answered with.

    Attributes:
        exactly: share of slots whose cell is the same (after a flip: the mirrored one).
        nearly: share of slots whose cell is the same or one of its neighbours, diagonal ones included.
        answer: whether the answer is the same class.
    """

    exactly: float
    nearly: float
    answer: bool


Change = Callable[[Picture, int], Picture]


def changes(seed: int) -> dict[str, Change]:
    """What is done to the model's input, by name; noise depends on `seed` and the picture's number only."""
    return {
        "JPEG quality 90": lambda picture, _: _recompressed(picture, 90),
        "JPEG quality 75": lambda picture, _: _recompressed(picture, 75),
        "JPEG quality 50": lambda picture, _: _recompressed(picture, 50),
        "resize by a pixel": lambda picture, _: _resized(picture),
        "noise, 2 counts": lambda picture, index: _noisy(picture, 2.0, seed, index),
        "noise, 5 counts": lambda picture, index: _noisy(picture, 5.0, seed, index),
        FLIP: lambda picture, _: picture[:, ::-1],
    }


def stability(
    runner: Perturber,
    pictures: NDArray[np.uint8],
    untouched: Outputs,
    indices: Sequence[int],
    metadata: Metadata,
    seed: int,
) -> list[dict[str, Kept]]:
    """Every change of n pictures, by name.

    Args:
        runner: the model.
        pictures: uint8 [n, H0, W0, 3].
        untouched: the model's answers for them.
        indices: the pictures' numbers in their data set.
        metadata: of the model.
        seed: of the noise.
    """
    found: list[dict[str, Kept]] = [{} for _ in pictures]
    for name, change in changes(seed).items():
        changed = np.stack([change(picture, index) for picture, index in zip(pictures, indices, strict=True)])
        outputs = runner.run(changed)
        for row, kept in enumerate(found):
            kept[name] = _compare(untouched, outputs, row, metadata, mirrored=name == FLIP)
    return found


def _compare(before: Outputs, after: Outputs, row: int, metadata: Metadata, *, mirrored: bool) -> Kept:
    if before.argmax is None or after.argmax is None:
        raise ValueError("a model without slots has no cells")
    m, width = metadata.prototypes_per_class, metadata.grid[1]
    predicted = int(before.logits[row].argmax())
    block = slice(predicted * m, (predicted + 1) * m)
    (old_row, old_col), (new_row, new_col) = (
        divmod(cells[row, block], width) for cells in (before.argmax, after.argmax)
    )
    if mirrored:
        new_col = width - 1 - new_col
    apart = np.maximum(np.abs(new_row - old_row), np.abs(new_col - old_col))
    return Kept(float((apart == 0).mean()), float((apart <= 1).mean()), int(after.logits[row].argmax()) == predicted)


def _recompressed(picture: Picture, quality: int) -> Picture:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream).convert("RGB"))


def _resized(picture: Picture) -> Picture:
    """One pixel wider and higher, and back."""
    height, width = picture.shape[:2]
    larger = Image.fromarray(picture).resize((width + 1, height + 1), Image.Resampling.BILINEAR)
    return np.asarray(larger.resize((width, height), Image.Resampling.BILINEAR))


def _noisy(picture: Picture, sigma: float, seed: int, index: int) -> Picture:
    # the same noise at every strength
    drawn = np.random.default_rng((_STREAM, seed, index)).standard_normal(picture.shape)
    return np.rint(picture + sigma * drawn).clip(0, 255).astype(np.uint8)
