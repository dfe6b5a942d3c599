"""What the model's tests share: where the real data lies."""

from __future__ import annotations

from pathlib import Path

import pytest

# the data that lies beside the project, not in it
SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_weights() -> Path:
    folder = SHARED_DATA / "weights"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture(scope="session")
def imagenet_samples() -> Path:
    folder = SHARED_DATA / "imagenet_samples"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder
