"""Real lists and photographs, where they lie beside the project."""

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data():
    def find(name):
        folder = SHARED_DATA / name
        if not folder.is_dir():
            pytest.skip(f"no {folder}")
        return folder

    return find
