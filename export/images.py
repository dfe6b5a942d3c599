"""What an export is verified on, and int8 calibrated with: pictures, not noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_input
from opal_deploy.synthetic import example_images, noise_image

Pixels = NDArray[np.uint8]
Answer = TypeVar("Answer", Outputs, Reference)

# of five slots each, so that one cell in 320 is less than the half percent that lower precisions may lose
CREATURES = 64
PHOTOGRAPHS = 64
# one, two, and an odd number: a graph that fixed its batch size, or mixes pictures of a batch, fails one of them
BATCHES = (1, 2, 7)
_VECTOR_CREATURES = 3
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}


@dataclass(frozen=True)
class VerificationImages:
    """Laid out for a model: uint8 [N, H0, W0, 3], a name each, and what they are as a whole."""

    pixels: Pixels
    names: tuple[str, ...]
    description: str


def choose_verification_images(
    metadata: Metadata, folder: Path | None, leave_out: Sequence[Path] = ()
) -> VerificationImages:
    """Photographs of `folder`, spread evenly over it, or generated creatures.

    Args:
        metadata: of the model, for its input size.
        folder: None for creatures.
        leave_out: files that something was tuned on, such as int8's ranges; they may not judge it.

    Raises:
        UsageError: the folder has fewer than sum(BATCHES) readable pictures besides.
    """
    if folder is None:
        names = tuple(f"creature {number}" for number in range(CREATURES))
        return VerificationImages(
            example_images(CREATURES, *metadata.input_size), names, f"{CREATURES} generated creatures"
        )
    found = read_images(folder, metadata.input_size, PHOTOGRAPHS, leave_out)
    if len(found.pixels) < sum(BATCHES):
        besides = " besides those that it is calibrated with" if leave_out else ""
        raise UsageError(
            f"{folder}: {len(found.pixels)} readable pictures{besides}; verification needs at least {sum(BATCHES)}"
        )
    return found


def read_images(
    folder: Path, input_size: tuple[int, int], count: int, leave_out: Sequence[Path] = ()
) -> VerificationImages:
    """At most `count` readable photographs of a folder and its subfolders, spread evenly; names are paths.

    Raises:
        UsageError: no such folder.
    """
    excluded = {path.resolve() for path in leave_out}
    paths = [path for path in image_files(folder) if path.resolve() not in excluded]
    pixels: list[Pixels] = []
    names: list[str] = []
    for path in _spread(paths, count):
        if len(pixels) == count:
            break
        try:
            image = decode(path)
        except ImageError:
            continue
        pixels.append(to_input(image, compute_geometry(image), input_size))
        names.append(str(path))
    stacked = np.stack(pixels) if pixels else np.empty((0, *input_size, 3), np.uint8)
    return VerificationImages(stacked, tuple(names), f"{len(pixels)} photographs of {folder.name}")


def image_files(folder: Path) -> list[Path]:
    """Files of a folder and its subfolders that are pictures by name, sorted.

    Raises:
        UsageError: no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of pictures")
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)


def _spread(paths: list[Path], count: int) -> list[Path]:
    """All paths; `count` of them at equal distances first, then the others, which stand in for unreadable ones."""
    chosen = {len(paths) * index // count for index in range(min(count, len(paths)))}
    rest = [path for index, path in enumerate(paths) if index not in chosen]
    return [paths[index] for index in sorted(chosen)] + rest


def test_vector_images(metadata: Metadata) -> Pixels:
    """The pictures of the stored test vectors: creatures, and one of noise; uint8 [N, H0, W0, 3]."""
    height, width = metadata.input_size
    return np.concatenate([example_images(_VECTOR_CREATURES, height, width), noise_image(height, width)[None]])


def in_batches(run: Callable[[Pixels], Answer], pixels: Pixels, join: Callable[[list[Answer]], Answer]) -> Answer:
    """Answers for all pictures, asked for in batches of 1, 2, 7, 7, 7, ..."""
    parts: list[Answer] = []
    start = 0
    while start < len(pixels):
        size = BATCHES[min(len(parts), len(BATCHES) - 1)]
        parts.append(run(pixels[start : start + size]))
        start += size
    return join(parts)
