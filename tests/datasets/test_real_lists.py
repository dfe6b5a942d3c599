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


def test_cub_mini(shared_data):
    data = read_dataset(shared_data("cub_mini"))
    assert (len(data.train) + len(data.val), len(data.val), len(data.test)) == (300, 60, 243)
    assert data.num_classes == 10
    assert data.class_names[0] == "001.Black_footed_Albatross"
    assert all(sample.box is not None for sample in data.train)
    first = next(s for s in data.test if s.path.name == "Black_Footed_Albatross_0046_18.jpg")
    assert first.box == (60.0, 27.0, 385.0, 331.0)
    assert data.warnings == []


def test_cub100_has_as_many_training_images_as_its_readme_says(shared_data):
    data = read_dataset(shared_data("cub100_227px"))
    assert (len(data.train) + len(data.val), len(data.test)) == (2999, 2903)
    assert data.num_classes == 100
    assert data.class_names[:2] == ["Black_footed_Albatross", "Groove_billed_Ani"]
    assert data.warnings == []


def test_pets_in_a_folder_of_another_name(shared_data):
    root = shared_data("pets_mini")
    data = read_dataset(root)
    assert (len(data.train) + len(data.val), len(data.test)) == (259, 112)
    assert data.num_classes == 37
    assert data.class_names[:3] == ["Abyssinian", "American Bulldog", "American Pit Bull Terrier"]
    assert all(s.path.is_relative_to(root) for s in data.train)
    assert data.warnings == ["skipped 1 image that no list names: images/Abyssinian_34.jpg"]


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
    data = read_dataset(flowers.parent, skip_missing=True)
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
    with pytest.raises(UsageError, match="damaged or not the official ones") as caught:
        read_dataset(tmp_path)
    assert "download" not in str(caught.value)
