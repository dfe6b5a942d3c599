"""The real lists of CUB, its 100-class subset, Pets and Flowers."""

import shutil
from collections import Counter

import pytest
from scipy.io import loadmat
from torchvision.datasets import Flowers102

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from tests.datasets.layouts import draw

pytestmark = pytest.mark.data


FLOWERS_LISTS = ("setid.mat", "imagelabels.mat")


@pytest.mark.parametrize(
    ("name", "sizes", "first_classes", "warnings"),
    [
        ("cub_mini", (240, 60, 243), ["001.Black_footed_Albatross", "002.Laysan_Albatross"], []),
        ("cub100_227px", (2399, 600, 2903), ["Black_footed_Albatross", "Groove_billed_Ani"], []),
        (
            "pets_mini", (207, 52, 112), ["Abyssinian", "American Bulldog"], [],
        ),
    ],
)  # fmt: skip
def test_real_lists_have_their_published_numbers(name, sizes, first_classes, warnings, shared_data):
    root = shared_data(name)
    data = read_dataset(root)
    assert (len(data.train), len(data.val), len(data.test)) == sizes
    assert (data.class_names[:2], data.warnings) == (first_classes, warnings)
    assert all((sample.box is not None) is (name == "cub_mini") for sample in data.train)
    assert all(sample.path.is_relative_to(root) for sample in data.train)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory, shared_data):
    """The official lists beside two training images and one validation image of every species, and five to test."""
    root = tmp_path_factory.mktemp("torchvision") / "flowers-102"
    root.mkdir()
    for name in FLOWERS_LISTS:
        shutil.copy(shared_data("flowers102_annotations") / name, root / name)
    labels = loadmat(root / "imagelabels.mat")["labels"][0]
    ids = loadmat(root / "setid.mat")
    for key, most in (("trnid", 2), ("valid", 1)):
        drawn = Counter()
        for number in map(int, ids[key][0]):
            if (drawn[labels[number - 1]]) < most:
                drawn[labels[number - 1]] += 1
                draw(root / "jpg" / f"image_{number:05}.jpg")
    for number in map(int, ids["tstid"][0][:5]):
        draw(root / "jpg" / f"image_{number:05}.jpg")
    return root


def test_flowers(flowers):
    data = read_dataset(flowers, skip_missing=True)
    assert (data.layout, data.crop, data.num_classes) == ("flowers", None, 102)
    assert (len(data.train), len(data.val), len(data.test)) == (204, 102, 5)
    assert len(data.skipped) == 8189 - 311
    labels = loadmat(flowers / "imagelabels.mat")["labels"][0]
    assert all(s.label == labels[int(s.path.stem[6:]) - 1] - 1 for s in [*data.train, *data.val, *data.test])
    assert data.class_names == Flowers102.classes
    assert data.class_names[76] == "passion flower"  # image_00001.jpg is of label 77
    theirs = Flowers102(flowers.parent, split="val")
    expected = {(p, label) for p, label in zip(theirs._image_files, theirs._labels, strict=True) if p.is_file()}
    assert {(s.path, s.label) for s in data.val} == expected


def test_other_flowers_lists_are_refused_by_their_checksums(tmp_path, shared_data):
    (tmp_path / "jpg").mkdir()
    for name in FLOWERS_LISTS:
        shutil.copy(shared_data("flowers102_annotations") / "setid.mat", tmp_path / name)
    with pytest.raises(UsageError, match="torchvision") as caught:
        read_dataset(tmp_path)
    assert "download" not in str(caught.value)
