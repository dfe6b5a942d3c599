"""The real lists of CUB and Pets."""

import pytest

from opal_deploy.datasets.registry import read_dataset
from tests.conftest import SHARED_DATA

pytestmark = pytest.mark.data


@pytest.mark.parametrize(
    ("name", "sizes", "first_classes", "warnings"),
    [
        ("cub_mini", (240, 60, 243), ["001.Black_footed_Albatross", "002.Laysan_Albatross"], []),
        ("pets_mini", (207, 52, 112), ["Abyssinian", "American Bulldog"], []),
    ],
)
def test_real_lists_have_their_published_numbers(name, sizes, first_classes, warnings):
    root = SHARED_DATA / name
    if not root.is_dir():
        pytest.skip(f"no {root}")
    data = read_dataset(root)
    assert (len(data.train), len(data.val), len(data.test)) == sizes
    assert (data.class_names[:2], data.warnings) == (first_classes, warnings)
    assert all((sample.box is not None) is (name == "cub_mini") for sample in data.train)
    assert all(sample.path.is_relative_to(root) for sample in data.train)
