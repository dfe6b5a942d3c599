"""Stanford Dogs: 120 breeds, its own Matlab lists, a box for every dog.

    Images/<nXXXXXXXX-Breed>/<stem>.jpg
    Annotation/<nXXXXXXXX-Breed>/<stem>     XML, without an extension
    train_list.mat, test_list.mat           in the folder itself or in lists/: file_list, labels (from 1)

Class names are the folders' names in the order of the lists' labels. Images are cropped to the dog's box, the first one
of several, with a warning. The official split, which has no validation images.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from opal_deploy.datasets.listing import (
    Adapter,
    LabeledPath,
    Listing,
    build_listing,
    find_escaping_paths,
    has_files,
    is_path_inside,
    missing_files,
    read_all,
    read_matlab,
    require_files,
)
from opal_deploy.datasets.samples import Sample, pluralize, shorten_list
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

_TITLE = "Stanford Dogs"
# LookupError: an unknown encoding
ANNOTATION_ERRORS = (OSError, ElementTree.ParseError, ValueError, LookupError)
_LISTS = {"train": "train_list.mat", "test": "test_list.mat"}


def _is_dogs(folder: Path) -> bool:
    images, annotation = find_folders(folder)
    return images.is_dir() and (annotation.is_dir() or has_files(_find_lists(folder), *_LISTS.values()))


def _read_dogs(folder: Path) -> Listing:
    """Read lists and boxes; annotations that are missing or damaged become problems.

    Raises:
        UsageError: folders or lists are missing or damaged.
    """
    (images, annotation), lists = find_folders(folder), _find_lists(folder)
    missing = [f"{path.relative_to(folder)}/" for path in (images, annotation) if not path.is_dir()]
    missing += missing_files(lists, _LISTS.values())
    require_files(folder, _TITLE, missing, "unpack images.tar, annotation.tar and lists.tar there")
    entries = read_all({split: partial(_read_list, lists / name) for split, name in _LISTS.items()})
    problems = [
        problem
        for split, pairs in entries.items()
        for problem in find_escaping_paths((name for name, _ in pairs), _LISTS[split], images.name)
    ]
    splits = {
        split: [(images / name, label) for name, label in pairs if is_path_inside(name)]
        for split, pairs in entries.items()
    }
    class_names, class_problems = _class_names([pair for pairs in splits.values() for pair in pairs])
    problems += class_problems
    listing = build_listing("dogs", folder, class_names, splits, problems=problems, image_folders=(images,))
    boxes = _BoxReader(images, annotation)
    data = listing.data
    train, test = ([boxes.add_box(sample) for sample in split] for split in (data.train, data.test))
    return replace(
        listing,
        data=replace(data, train=train, test=test, crop="boxes", warnings=boxes.warnings()),
        problems=[*listing.problems, *boxes.problems()],
    )


class _BoxReader:
    """Adds boxes to samples; remembers annotations that are missing, damaged, or have several boxes."""

    def __init__(self, images: Path, annotation: Path) -> None:
        self._images, self._annotation = images, annotation
        self._missing: list[str] = []
        self._damaged: list[str] = []
        self._several: list[str] = []

    def add_box(self, sample: Sample) -> Sample:
        name = str(sample.path.relative_to(self._images).with_suffix(""))
        try:
            boxes = read_annotation(self._annotation / name)
        except FileNotFoundError:
            # if the image is missing too, only the image is reported
            if sample.path.is_file():
                self._missing.append(name)
            return sample
        except ANNOTATION_ERRORS as error:
            self._damaged.append(f"{name} ({error})")
            return sample
        if len(boxes) > 1:
            self._several.append(name)
        return replace(sample, box=boxes[0])

    def problems(self) -> list[str]:
        findings = (
            ("is missing", "are missing", self._missing),
            ("has no readable box", "have no readable box", self._damaged),
        )
        return [
            f"{pluralize(len(names), f'annotation {one}', f'annotations {many}')} in {self._annotation.name}/: "
            f"{shorten_list(names)}"
            for one, many, names in findings
            if names
        ]

    def warnings(self) -> list[str]:
        if not self._several:
            return []
        images = pluralize(len(self._several), "image has", "images have")
        return [f"{images} several boxes, the first is used: {shorten_list(self._several)}"]


def read_annotation(path: Path) -> list[Box]:
    """Return the one or more boxes of an annotation in PASCAL VOC's XML, (x0, y0, x1, y1) in pixels.

    Raises:
        ANNOTATION_ERRORS: the file cannot be read, is not XML, or has no box of four numbers.
    """
    boxes = []
    for element in ElementTree.parse(path).getroot().findall("object/bndbox"):
        x0, y0, x1, y1 = (float(element.findtext(edge, "absent")) for edge in ("xmin", "ymin", "xmax", "ymax"))
        boxes.append((x0, y0, x1, y1))
    if not boxes:
        raise ValueError("no object/bndbox")
    return boxes


def _read_list(path: Path) -> list[tuple[str, int]]:
    """Return paths under the images' folder, and class indices from 0."""
    variables = read_matlab(path)
    if missing := [name for name in ("file_list", "labels") if name not in variables]:
        raise UsageError(f"{path}: lacks {' and '.join(missing)}; unpack lists.tar again")
    files = [str(name) for name in np.atleast_1d(variables["file_list"])]
    labels = [_parse_label(value, path) for value in np.atleast_1d(variables["labels"])]
    if len(files) != len(labels):
        numbers = f"{pluralize(len(files), 'file', 'files')} but {pluralize(len(labels), 'label', 'labels')}"
        raise UsageError(f"{path}: {numbers}; unpack lists.tar again")
    return list(zip(files, labels, strict=True))


def _parse_label(value: Any, path: Path) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    # a larger label would make a list of unused labels that fills the memory
    if not (number.is_integer() and number < 1e6):
        raise UsageError(
            f"{path}: label {str(value)[:40]!r}, expected a class id counted from 1; unpack lists.tar again"
        )
    return int(number) - 1


def _class_names(pairs: list[LabeledPath]) -> tuple[list[str], list[str]]:
    """Return the breeds' folders in the order of the labels, and problems."""
    folders: dict[int, set[str]] = {}
    for path, label in pairs:
        folders.setdefault(label, set()).add(path.parent.name)
    problems = [
        f"label {label + 1} of the lists has several folders: {shorten_list(sorted(names))}"
        for label, names in sorted(folders.items())
        if len(names) > 1
    ]
    count = max(folders, default=-1) + 1
    if unused := [str(label + 1) for label in range(count) if label not in folders]:
        problems.append(f"labels of the lists without an image: {shorten_list(unused)}")
    return [min(folders.get(label, {f"label {label + 1}"})) for label in range(count)], problems


def find_folders(folder: Path) -> tuple[Path, Path]:
    """Return the folders of images and annotations, as Kaggle packs them or as the authors do."""
    kaggle = folder / "images" / "Images", folder / "annotations" / "Annotation"
    return kaggle if kaggle[0].is_dir() else (folder / "Images", folder / "Annotation")


def _find_lists(folder: Path) -> Path:
    return folder / "lists" if (folder / "lists" / _LISTS["train"]).is_file() else folder


DOGS = Adapter("dogs", _TITLE, _is_dogs, _read_dogs, ("stanford_dogs", "StanfordDogs", "stanford-dogs", "dogs"))
