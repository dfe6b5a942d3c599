"""One small data set for the trainer's tests, and the real weights where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet

# the data that lies beside the project, not in it
SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def resnet18_weights() -> Path:
    path = SHARED_DATA / "weights" / "resnet18_ktb_small.safetensors"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return path


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """Colored squares on noise: 24 images to train on, 6 to validate, 9 to test."""
    root, rng = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 3)):
        for name, color in {"blue": (40, 60, 220), "green": (40, 190, 60), "red": (220, 50, 40)}.items():
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(90, 140, (48, 56, 3), dtype=np.uint8)
                row, col = rng.integers(0, 20, 2)
                pixels[row : row + 24, col : col + 24] = color
                Image.fromarray(pixels).save(root / split / name / f"{index:02}.png")
    return read_dataset(root)
