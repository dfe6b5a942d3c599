"""Data sets for the trainer's tests: the real CUB and real weights, where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

# the data that lies beside the project, not in it
SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def resnet18_weights() -> Path:
    path = SHARED_DATA / "weights" / "resnet18_ktb_small.safetensors"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return path
