"""Pictures that are always at hand: what an exported graph is compared with PyTorch on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import UsageError
from opal_deploy.synthetic.creatures import check_size, draw
from opal_deploy.synthetic.species import MAX_SPECIES, list_species

_SEED = 20260917


def example_images(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Creatures of different species (up to `MAX_SPECIES`, then again from the first), each in a scene of its own.

    The same arguments give the same pictures wherever numpy and Pillow are the same; picture i does not depend on
    `count`.

    Returns:
        uint8 [count, height, width, 3], RGB.

    Raises:
        UsageError: `count` is negative or a side is under 32 pixels.
    """
    if count < 0:
        raise UsageError(f"{count} pictures asked for: the number must not be negative")
    check_size((height, width))
    pictures = np.empty((count, height, width, 3), dtype=np.uint8)
    kinds = list_species(MAX_SPECIES)
    for i in range(count):
        pictures[i] = draw(kinds[i % MAX_SPECIES], np.random.default_rng([_SEED, i]), (height, width)).image
    return pictures


def noise_image(height: int, width: int) -> NDArray[np.uint8]:
    """Uniform noise, always the same: uint8 [height, width, 3]."""
    return np.random.default_rng(_SEED).integers(0, 256, (height, width, 3), dtype=np.uint8)
