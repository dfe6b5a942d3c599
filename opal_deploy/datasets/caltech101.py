"""Caltech-101: 101 kinds of things, whole pictures, NO official split.

    101_ObjectCategories/<class>/image_<nnnn>.jpg       numbered from 0001

Published results differ in their splits. Here a stratified fifth of each class is the test split: scikit-learn's
StratifiedShuffleSplit(test_size=0.2, random_state=42) over all pictures, classes sorted by name as torchvision sorts
them, BACKGROUND_Google left out (it is no class). A warning says so, because accuracies measured on it compare with no
others.

torchvision.datasets.Caltech101 has no list to read either: it counts the files of a folder, and one stray or missing
file makes it name pictures that are not there. The folders are read here instead, a gap in the numbers is a missing
picture.
"""

from __future__ import annotations

import re
from pathlib import Path

from opal_deploy.datasets.image_folder import subfolders
from opal_deploy.datasets.listing import Adapter, Listing, Pair, from_pairs, has, lacking, require_files
from opal_deploy.datasets.samples import SPLITS, counted, stratified_split
from opal_deploy.errors import UsageError

_TITLE = "Caltech-101"
_FOLDER = "101_ObjectCategories"
_BACKGROUND = "BACKGROUND_Google"
_PICTURE = re.compile(r"image_(\d{4})\.jpg")


def is_caltech101(folder: Path) -> bool:
    """Whether it has the archive's folder of classes."""
    return has(folder, f"{_FOLDER}/")


def read(folder: Path) -> Listing:
    """The folders' content.

    Raises:
        UsageError: no folder of classes, or too few pictures to split.
    """
    require_files(folder, _TITLE, lacking(folder, [f"{_FOLDER}/"]), f"unpack {_FOLDER}.tar.gz there")
    classes = [found for found in subfolders(folder / _FOLDER) if found.name != _BACKGROUND]
    class_names = [found.name for found in classes]
    pairs: list[Pair] = []
    for label, found in enumerate(classes):
        numbers = [int(match[1]) for path in found.iterdir() if (match := _PICTURE.fullmatch(path.name))]
        pairs += [(found / f"image_{number:04}.jpg", label) for number in range(1, max(numbers, default=0) + 1)]
    if len(classes) < 2:
        raise UsageError(
            f"{folder}: {counted(len(classes), 'class folder', 'class folders')} in {_FOLDER}/, at least 2 are needed; "
            "unpack it again"
        )
    train, test = stratified_split(
        [label for _, label in pairs],
        class_names,
        root=folder,
        part="test",
        advice="unpack the official archive again",
    )
    split = SPLITS["authors"]
    return from_pairs(
        "caltech101",
        folder,
        class_names,
        {"train": [pairs[i] for i in train], "test": [pairs[i] for i in test]},
        warnings=[
            f"{_TITLE} has no official split: a stratified {split.fraction:.0%} of each class is tested on (seed "
            f"{split.seed}), which compares with no published result"
        ],
        pictures=tuple(classes),
    )


ADAPTER = Adapter(
    "caltech101", _TITLE, is_caltech101, lambda folder, _: read(folder), ("caltech101", "caltech-101", "Caltech101")
)
