"""Caltech-101: 101 kinds of objects, whole images, NO official split.

    101_ObjectCategories/<class>/image_<nnnn>.jpg       numbered from 0001

Published results differ in their splits. Here a stratified fifth of each class is the test split: scikit-learn's
StratifiedShuffleSplit(test_size=0.2, random_state=42) over all images, classes sorted by name as torchvision sorts
them, BACKGROUND_Google left out (it is no class). A warning says so, because accuracies measured on this split compare
with no others.

torchvision.datasets.Caltech101 reads no list either: it counts the files of a folder, and one stray or missing file
makes it name images that are not there. So the folders are read here, and a gap in the numbers is a missing image.
"""

from __future__ import annotations

import re
from pathlib import Path

from opal_deploy.datasets.image_folder import subfolders
from opal_deploy.datasets.listing import (
    Adapter,
    LabeledPath,
    Listing,
    build_listing,
    has_files,
    missing_files,
    require_files,
)
from opal_deploy.datasets.samples import SPLIT_FRACTION, SPLIT_SEED, pluralize, stratified_split
from opal_deploy.errors import UsageError

_TITLE = "Caltech-101"
_CLASSES = "101_ObjectCategories"
_BACKGROUND = "BACKGROUND_Google"
_IMAGE_NAME = re.compile(r"image_(\d{4})\.jpg")


def _is_caltech101(folder: Path) -> bool:
    return has_files(folder, f"{_CLASSES}/")


def _read_caltech101(folder: Path) -> Listing:
    """Read the class folders and split their images.

    Raises:
        UsageError: no class folders, or too few images to split.
    """
    require_files(folder, _TITLE, missing_files(folder, [f"{_CLASSES}/"]), f"unpack {_CLASSES}.tar.gz there")
    classes = [subfolder for subfolder in subfolders(folder / _CLASSES) if subfolder.name != _BACKGROUND]
    class_names = [subfolder.name for subfolder in classes]
    pairs: list[LabeledPath] = []
    for label, subfolder in enumerate(classes):
        numbers = [int(match[1]) for path in subfolder.iterdir() if (match := _IMAGE_NAME.fullmatch(path.name))]
        pairs += [(subfolder / f"image_{number:04}.jpg", label) for number in range(1, max(numbers, default=0) + 1)]
    if len(classes) < 2:
        raise UsageError(
            f"{folder}: {pluralize(len(classes), 'class folder', 'class folders')} in {_CLASSES}/, "
            "at least 2 are needed; unpack it again"
        )
    train, test = stratified_split(
        [label for _, label in pairs],
        class_names,
        root=folder,
        part="test",
        advice="unpack the official archive again",
    )
    return build_listing(
        "caltech101",
        folder,
        class_names,
        {"train": [pairs[i] for i in train], "test": [pairs[i] for i in test]},
        warnings=[
            f"{_TITLE} has no official split: a stratified {SPLIT_FRACTION:.0%} of each class is tested on (seed "
            f"{SPLIT_SEED}), which compares with no published result"
        ],
        image_folders=tuple(classes),
    )


CALTECH101 = Adapter(
    "caltech101",
    _TITLE,
    _is_caltech101,
    lambda folder, partition: _read_caltech101(folder),
    ("caltech101", "caltech-101", "Caltech101"),
)
