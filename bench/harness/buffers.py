"""Inputs to time with: several batches of noise, so that no call finds its input in the cache of the last."""

from __future__ import annotations

import numpy as np

from opal_deploy.runtime.session import ImageBatch


def random_batches(count: int, batch: int, size: tuple[int, int], *, seed: int = 0) -> list[ImageBatch]:
    """`count` arrays, uint8 [batch, H0, W0, 3], all different; the same for the same seed and numpy."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (batch, *size, 3), dtype=np.uint8) for _ in range(count)]
