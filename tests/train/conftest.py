"""Small data sets for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet

COLORS = {"blue": (40, 60, 220), "green": (40, 190, 60), "red": (220, 50, 40)}
WriteSquares = Callable[[Path, dict[str, Sequence[int]]], Path]


@pytest.fixture(scope="session")
def write_squares() -> WriteSquares:
    """`write_squares(root, {split: counts})` draws that many colored squares on noise for each of three classes."""

    def write(root: Path, splits: dict[str, Sequence[int]]) -> Path:
        rng = np.random.default_rng(0)
        for split, counts in splits.items():
            for (name, color), count in zip(COLORS.items(), counts, strict=True):
                (root / split / name).mkdir(parents=True)
                for index in range(count):
                    pixels = rng.integers(90, 140, (48, 56, 3), dtype=np.uint8)
                    row, col = rng.integers(0, 20, 2)
                    pixels[row : row + 24, col : col + 24] = color
                    Image.fromarray(pixels).save(root / split / name / f"{index:02}.png")
        return root

    return write


@pytest.fixture(scope="session")
def squares(write_squares: WriteSquares, tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """24 images to train on, 6 to validate, 9 to test."""
    root = tmp_path_factory.mktemp("squares")
    return read_dataset(write_squares(root, {"train": (10, 10, 10), "test": (3, 3, 3)}))
