"""Small data sets for the trainer's tests."""

import numpy as np
import pytest
from PIL import Image

from opal_deploy.datasets.registry import read_dataset
from tests.train.fitting import small

COLORS = {"blue": (40, 60, 220), "green": (40, 190, 60), "red": (220, 50, 40)}


@pytest.fixture(scope="session")
def write_squares():
    """`write_squares(root, {split: counts})` draws that many colored squares on noise for each of three classes."""

    def write(root, splits):
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
def squares(write_squares, tmp_path_factory):
    """24 images to train on, 6 to validate, 9 to test."""
    root = tmp_path_factory.mktemp("squares")
    return read_dataset(write_squares(root, {"train": (10, 10, 10), "test": (3, 3, 3)}))


@pytest.fixture(scope="session")
def fitted_options(lite0_weights):
    """Options of a run that fits the head to a pretrained network, and nothing else."""
    return small(
        backbone="timm:tf_efficientnet_lite0", weights=str(lite0_weights), head_steps=60, epochs=0, batch_size=8,
        size=64, stride=16, schedule="cosine",
    )  # fmt: skip
