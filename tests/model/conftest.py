"""What the model's tests share: where the real data lies, and two threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# the data that lies beside the project, not in it
SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


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
