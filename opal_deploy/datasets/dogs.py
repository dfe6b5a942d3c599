"""Stanford Dogs: 120 breeds, its own Matlab lists, a box for every dog.

    Images/<nXXXXXXXX-Breed>/<stem>.jpg
    Annotation/<nXXXXXXXX-Breed>/<stem>     XML, without an extension
    train_list.mat, test_list.mat           in the folder itself or in lists/: file_list, labels (from 1)

Class names are the folders' names in the order of the lists' labels. Images are cropped to the dog's box; if there are
several, to the first, with a warning. The official split is used; it has no validation images.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from opal_deploy.datasets.listing import (
    Adapter,
    LabeledPath,
    Listing,
    build_listing,
    find_escaping_paths,
    group_names,
    has_files,
    is_path_inside,
    missing_files,
    read_matlab,
    require_files,
)
from opal_deploy.datasets.samples import Sample, pluralize, shorten_list
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

_TITLE = "Stanford Dogs"
# LookupError: an unknown encoding
ANNOTATION_ERRORS = (OSError, ElementTree.ParseError, ValueError, LookupError)
_MAX_LABEL = 1_000_000
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
    problems: list[str] = []
    splits: dict[str, list[LabeledPath]] = {}
    for split, file in _LISTS.items():
        listed = _read_list(lists / file)
        problems += find_escaping_paths((name for name, _ in listed), file, images.name)
        splits[split] = [(images / name, label) for name, label in listed if is_path_inside(name)]
    every = [pair for pairs in splits.values() for pair in pairs]
    breeds, class_problems = group_names(every, lambda path: path.parent.name, "the lists")
    class_names = [min(breeds.get(label, {f"label {label + 1}"})) for label in range(max(breeds, default=-1) + 1)]
    listing = build_listing("dogs", folder, class_names, splits, image_folders=(images,))
    findings: dict[str, list[str]] = {"missing": [], "without a readable box": [], "with several boxes": []}
    train, test = (
        [_add_box(sample, images, annotation, findings) for sample in split]
        for split in (listing.data.train, listing.data.test)
    )
    several = findings.pop("with several boxes")
    warnings = [f"images with several boxes, the first is used: {shorten_list(several)}"] if several else []
    problems += class_problems + listing.problems
    problems += [
        f"annotations {what} in {annotation.name}/: {shorten_list(names)}" for what, names in findings.items() if names
    ]
    data = replace(listing.data, train=train, test=test, crop="boxes", warnings=warnings)
    return replace(listing, data=data, problems=problems)


def _add_box(sample: Sample, images: Path, annotation: Path, findings: dict[str, list[str]]) -> Sample:
    """Return a sample with its annotation's first box; adds the annotation's faults to `findings`."""
    name = str(sample.path.relative_to(images).with_suffix(""))
    try:
        boxes = read_annotation(annotation / name)
    except FileNotFoundError:
        # if the image is missing too, only the image is reported
        findings["missing"] += [name] if sample.path.is_file() else []
        return sample
    except ANNOTATION_ERRORS as error:
        findings["without a readable box"].append(f"{name} ({error})")
        return sample
    findings["with several boxes"] += [name] if len(boxes) > 1 else []
    return replace(sample, box=boxes[0])


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
    numbers = np.atleast_1d(variables["labels"])
    try:
        # a larger label would make a list of unused labels that fills the memory
        are_ids = np.all((np.float64(numbers) % 1 == 0) & (np.float64(numbers) < _MAX_LABEL))
    except (TypeError, ValueError):
        are_ids = np.False_
    if len(files) != len(numbers) or not are_ids:
        raise UsageError(
            f"{path}: {pluralize(len(files), 'file', 'files')} with the labels {shorten_list([*map(str, numbers)])}; "
            "expected a class id counted from 1 for each file; unpack lists.tar again"
        )
    return [(name, int(number) - 1) for name, number in zip(files, numbers, strict=True)]


def find_folders(folder: Path) -> tuple[Path, Path]:
    """Return the folders of images and annotations, as Kaggle packs them or as the authors do."""
    kaggle = folder / "images" / "Images", folder / "annotations" / "Annotation"
    return kaggle if kaggle[0].is_dir() else (folder / "Images", folder / "Annotation")


def _find_lists(folder: Path) -> Path:
    return folder / "lists" if (folder / "lists" / _LISTS["train"]).is_file() else folder


DOGS = Adapter("dogs", _TITLE, _is_dogs, _read_dogs, ("stanford_dogs", "StanfordDogs", "stanford-dogs", "dogs"))
