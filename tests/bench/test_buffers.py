"""Inputs of noise."""

from __future__ import annotations

import numpy as np

from opal_deploy.bench.timing import random_batches


def test_they_are_pictures_all_different_and_the_same_for_the_same_seed() -> None:
    found = random_batches(3, 2, (4, 6))

    assert [(b.shape, b.dtype) for b in found] == [((2, 4, 6, 3), np.dtype(np.uint8))] * 3
    assert not np.array_equal(found[0], found[1])
    assert all(np.array_equal(a, b) for a, b in zip(found, random_batches(3, 2, (4, 6)), strict=True))
    assert not np.array_equal(found[0], random_batches(1, 2, (4, 6), seed=1)[0])


def test_the_whole_range_of_pixels_comes_up() -> None:
    (batch,) = random_batches(1, 1, (100, 100))

    assert (batch.min(), batch.max()) == (0, 255)
