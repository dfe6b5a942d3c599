"""Stanford Dogs: 120 breeds, its own Matlab lists, a box for every dog.

    Images/<nXXXXXXXX-Breed>/<stem>.jpg
    Annotation/<nXXXXXXXX-Breed>/<stem>     XML, without an extension
    train_list.mat, test_list.mat           in the folder itself or in lists/: file_list, labels (from 1)

Class names are the folders' names in the order of the lists' labels. Pictures are cropped to the dog's box. Where an
annotation has several objects the first is taken, and a warning counts such pictures. The official split; it has no
validation pictures.
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
    Listing,
    Pair,
    all_of,
    from_pairs,
    has,
    lacking,
    leaving,
    require_files,
    stays_below,
)
from opal_deploy.datasets.samples import Sample, counted, listed
from opal_deploy.datasets.torchvision_lists import load_matlab
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

_TITLE = "Stanford Dogs"


def is_dogs(folder: Path) -> bool:
    """Whether it has the pictures beside the annotations or the lists."""
    images, annotation = _pictures_and_boxes(folder)
    return images.is_dir() and (annotation.is_dir() or has(_lists(folder), "train_list.mat", "test_list.mat"))


def read(folder: Path) -> Listing:
    """The lists' content; annotations that are absent or damaged become problems.

    Raises:
        UsageError: folders or lists that are absent or damaged.
    """
    (images, annotation), lists = _pictures_and_boxes(folder), _lists(folder)
    absent = [f"{path.relative_to(folder)}/" for path in (images, annotation) if not path.is_dir()]
    absent += lacking(lists, ("train_list.mat", "test_list.mat"))
    require_files(folder, _TITLE, absent, "unpack images.tar, annotation.tar and lists.tar there")
    names = {split: lists / f"{split}_list.mat" for split in ("train", "test")}
    found = all_of({split: partial(_list, path) for split, path in names.items()})
    problems = [
        problem
        for split, pairs in found.items()
        for problem in leaving((name for name, _ in pairs), names[split].name, images.name)
    ]
    splits = {
        split: [(images / name, label) for name, label in pairs if stays_below(name)] for split, pairs in found.items()
    }
    class_names, strange = _class_names([pair for pairs in splits.values() for pair in pairs])
    problems += strange
    listing = from_pairs("dogs", folder, class_names, splits, problems=problems, pictures=(images,))
    boxes = _Boxes(images, annotation)
    data = listing.data
    train, test = [boxes.on(sample) for sample in data.train], [boxes.on(sample) for sample in data.test]
    data = replace(data, train=train, test=test, crop="boxes", warnings=boxes.warnings())
    return replace(listing, data=data, problems=[*listing.problems, *boxes.problems()])


class _Boxes:
    """Finds the boxes and keeps account of the annotations that are not as they should be."""

    def __init__(self, images: Path, annotation: Path) -> None:
        self._images, self._annotation = images, annotation
        self._absent: list[str] = []
        self._damaged: list[str] = []
        self._several: list[str] = []

    def on(self, sample: Sample) -> Sample:
        """The sample with its box."""
        name = str(sample.path.relative_to(self._images).with_suffix(""))
        try:
            found = _boxes(self._annotation / name)
        except FileNotFoundError:
            # of a picture that is missing as well, the missing picture is what to report
            if sample.path.is_file():
                self._absent.append(name)
            return sample
        except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:  # an unknown encoding is the last
            self._damaged.append(f"{name} ({error})")
            return sample
        if len(found) > 1:
            self._several.append(name)
        return replace(sample, box=found[0])

    def problems(self) -> list[str]:
        lines = []
        if self._absent:
            are = counted(len(self._absent), "annotation is", "annotations are")
            lines.append(f"{are} missing in {self._annotation.name}/: {listed(self._absent)}")
        if self._damaged:
            have = counted(len(self._damaged), "annotation has", "annotations have")
            lines.append(f"{have} no readable box in {self._annotation.name}/: {listed(self._damaged)}")
        return lines

    def warnings(self) -> list[str]:
        if not self._several:
            return []
        pictures = counted(len(self._several), "picture has", "pictures have")
        return [f"{pictures} several boxes, the first is taken: {listed(self._several)}"]


def _boxes(path: Path) -> list[Box]:
    """One or more boxes of an annotation, in pixels.

    Raises:
        ValueError: none, or one that is not four numbers.
    """
    found = []
    for box in ElementTree.parse(path).getroot().findall("object/bndbox"):
        x0, y0, x1, y1 = (float(box.findtext(edge, "absent")) for edge in ("xmin", "ymin", "xmax", "ymax"))
        found.append((x0, y0, x1, y1))
    if not found:
        raise ValueError("no object/bndbox")
    return found


def _list(path: Path) -> list[tuple[str, int]]:
    """Paths under the pictures' folder, and class indices from 0."""
    variables = load_matlab(path)
    if absent := [name for name in ("file_list", "labels") if name not in variables]:
        raise UsageError(f"{path}: it has no {' and no '.join(absent)}; unpack lists.tar again")
    files = [str(name) for name in np.atleast_1d(variables["file_list"])]
    labels = [_label(value, path) for value in np.atleast_1d(variables["labels"])]
    if len(files) != len(labels):
        numbers = f"{counted(len(files), 'file', 'files')} but {counted(len(labels), 'label', 'labels')}"
        raise UsageError(f"{path}: {numbers}; unpack lists.tar again")
    return list(zip(files, labels, strict=True))


def _label(value: Any, path: Path) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    # beyond that a list of the gaps would fill the memory
    if not (number.is_integer() and number < 1e6):
        raise UsageError(
            f"{path}: the label {str(value)[:40]!r} is no class id, counted from 1; unpack lists.tar again"
        )
    return int(number) - 1


def _class_names(pairs: list[Pair]) -> tuple[list[str], list[str]]:
    """The breeds' folders in the order of the labels, and what is wrong with them."""
    folders: dict[int, set[str]] = {}
    for path, label in pairs:
        folders.setdefault(label, set()).add(path.parent.name)
    problems = [
        f"label {label + 1} of the lists stands for several folders: {listed(sorted(names))}"
        for label, names in sorted(folders.items())
        if len(names) > 1
    ]
    count = max(folders, default=-1) + 1
    if gaps := [str(label + 1) for label in range(count) if label not in folders]:
        problems.append(f"labels of the lists without a picture: {listed(gaps)}")
    return [min(folders.get(label, {f"label {label + 1}"})) for label in range(count)], problems


def _pictures_and_boxes(folder: Path) -> tuple[Path, Path]:
    # as Kaggle packs them, or as the authors do
    kaggle = folder / "images" / "Images", folder / "annotations" / "Annotation"
    return kaggle if kaggle[0].is_dir() else (folder / "Images", folder / "Annotation")


def _lists(folder: Path) -> Path:
    return folder / "lists" if (folder / "lists" / "train_list.mat").is_file() else folder


ADAPTER = Adapter(
    "dogs", _TITLE, is_dogs, lambda folder, _: read(folder), ("stanford_dogs", "StanfordDogs", "stanford-dogs", "dogs")
)
