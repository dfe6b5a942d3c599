"""Data sets for the trainer's tests: the real CUB and real weights, where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# the data that lies beside the project, not in it
SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # the networks here are tiny: on a busy machine a second thread is waited for longer than it helps
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cub_mini() -> Path:
    folder = SHARED_DATA / "cub_mini"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture(scope="session")
def cub_metadata_full() -> Path:
    folder = SHARED_DATA / "cub_metadata_full"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture(scope="session")
def resnet18_weights() -> Path:
    path = SHARED_DATA / "weights" / "resnet18_ktb_small.safetensors"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return path
