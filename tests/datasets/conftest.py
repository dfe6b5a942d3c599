"""Real lists and photographs, where they lie beside the project."""

import pytest

from tests.conftest import SHARED_DATA


@pytest.fixture(scope="session")
def shared_data():
    def find(name):
        if not (SHARED_DATA / name).is_dir():
            pytest.skip(f"no {SHARED_DATA / name}")
        return SHARED_DATA / name

    return find
