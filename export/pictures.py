"""What an export is verified on: pictures, not noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.demo import example_pictures, noise_picture
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.resize import lay_out, to_input

Pictures = NDArray[np.uint8]
Answer = TypeVar("Answer", Outputs, Reference)

DEFAULT_COUNT = 32
# one, two, and an odd number: a graph that fixed its batch size, or mixes pictures of a batch, fails one of them
BATCHES = (1, 2, 7)
_VECTOR_CREATURES = 3
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}


def verification_pictures(metadata: Metadata, folder: Path | None, count: int = DEFAULT_COUNT) -> tuple[Pictures, str]:
    """uint8 [N, H0, W0, 3] and what they are: photographs of `folder`, or generated creatures.

    Raises:
        UsageError: the folder has fewer than sum(BATCHES) readable pictures.
    """
    if folder is None:
        return example_pictures(count, *metadata.input_size), f"{count} generated creatures"
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of pictures")
    pictures: list[NDArray[np.uint8]] = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES):
        if len(pictures) == count:
            break
        try:
            image = decode(path)
        except ImageError:
            continue
        pictures.append(to_input(image, lay_out(image), metadata.input_size))
    if len(pictures) < sum(BATCHES):
        raise UsageError(f"{folder}: {len(pictures)} readable pictures; verification needs at least {sum(BATCHES)}")
    return np.stack(pictures), f"{len(pictures)} photographs"


def vector_pictures(metadata: Metadata) -> Pictures:
    """The pictures of the stored test vectors: creatures, and one of noise; uint8 [N, H0, W0, 3]."""
    height, width = metadata.input_size
    return np.concatenate([example_pictures(_VECTOR_CREATURES, height, width), noise_picture(height, width)[None]])


def in_batches(run: Callable[[Pictures], Answer], pictures: Pictures, join: Callable[[list[Answer]], Answer]) -> Answer:
    """Answers for all pictures, asked for in batches of 1, 2, 7, 7, 7, ..."""
    parts: list[Answer] = []
    start = 0
    while start < len(pictures):
        size = BATCHES[min(len(parts), len(BATCHES) - 1)]
        parts.append(run(pictures[start : start + size]))
        start += size
    return join(parts)
