"""Boxes and labels of images, read from files and found by the image's path.

Boxes crop an image for the model. They come from a detector (`detections`); from a CSV file with the column `image` and
either `x0,y0,x1,y1` or `x,y,width,height`; from a COCO file (https://cocodataset.org/#format-data), one per image; or
from CUB-200-2011 and Stanford Dogs (`datasets.boxes`). All but the detector's are in pixels of the image as a viewer
shows it.

Objects are what an image shows, any number per image, from a COCO file. Labels are the true classes of images: the
names of their folders, or a CSV file with the columns `image` and `label`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from opal_deploy.artifact.files import compute_sha256, read_text
from opal_deploy.errors import ImageError, UsageError, first_line
from opal_deploy.options import DEFAULT_CONFIDENCE
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import unescape_name
from opal_deploy.remote import is_url, redact
from opal_deploy.sources.detections import DETECTIONS_KEY, Boxes, Crop, Crops, read_detections
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.items import PathLookup, normalize_name

# the argument of --labels that means the names of the folders
FOLDERS = "folders"

_CORNER_COLUMNS = ("image", "x0", "y0", "x1", "y1")
_SIZE_COLUMNS = ("image", "x", "y", "width", "height")


def read_boxes(path: Path, confidence: float = DEFAULT_CONFIDENCE) -> Crops:
    """Read a CSV or COCO file, MegaDetector's results, CUB's bounding_boxes.txt, or a folder such as Stanford Dogs'.

    If an annotation of such a folder has several boxes, the first is taken, as in training; other files may have one
    per image.

    Args:
        path: the file or folder, or the folder of a data set that has one.
        confidence: the lowest of a detector's boxes that count, 0 ... 1.

    Raises:
        UsageError: unreadable, other columns or keys, not a number, an image with two boxes.
    """
    from opal_deploy.datasets.boxes import find_box_file, is_cub_boxes, read_cub_boxes
    from opal_deploy.datasets.cub import IMAGES

    if os.path.isdir(path):
        file = find_box_file(path)
        return _read_box_folder(path) if file is None else read_boxes(file, confidence)
    try:
        text = read_text(path, "surrogateescape")
    except OSError as error:
        expected = "expected a CSV or COCO file, MegaDetector's results, CUB's bounding_boxes.txt, or its folder"
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); {expected}") from None
    identity = f"{path.name}, sha256 {compute_sha256(path)}"
    if text.lstrip().startswith("{") and f'"{DETECTIONS_KEY}"' in text:
        return read_detections(path, text, identity, confidence)
    if text.lstrip().startswith("{"):
        rows = [(name, thing.box) for name, thing in _parse_coco(path, text)]
    elif is_cub_boxes(text):
        rows = read_cub_boxes(path)
        identity += f"; {IMAGES}, sha256 {compute_sha256(path.with_name(IMAGES))}"
    else:
        rows = list(_parse_box_rows(path, text))
    by_name: dict[str, Box] = {}
    for name, box in rows:
        name = normalize_name(name)
        if name in by_name:
            raise UsageError(f"{path}: two boxes for {name}; expected one per image")
        by_name[name] = box
    if not by_name:
        raise UsageError(f"{path}: no boxes in it")
    return Boxes(by_name, path.name, identity)


def _read_box_folder(folder: Path) -> Boxes:
    from opal_deploy.datasets.boxes import read_annotation_folder

    boxes = read_annotation_folder(folder)
    name, digest = f"{folder.resolve().name}/", hashlib.sha256(json.dumps(boxes).encode()).hexdigest()
    several = sum(len(image_boxes) > 1 for image_boxes in boxes.values())
    return Boxes(
        {normalize_name(image): image_boxes[0] for image, image_boxes in boxes.items()},
        name,
        f"{name}, {len(boxes)} annotations, sha256 of their boxes {digest}",
        by_stem=True,
        note=f"--boxes: {several} annotations have several boxes; the first is used, as in training" if several else "",
    )


def _parse_box_rows(path: Path, text: str) -> Iterator[tuple[str, Box]]:
    columns, rows = _read_csv(f"{path}", text, _CORNER_COLUMNS, _SIZE_COLUMNS)
    for line, (name, *values) in rows:
        try:
            a, b, c, d = (float(value or "") for value in values)
        except ValueError:
            raise UsageError(f"{path}: line {line} has no four numbers in {', '.join(columns[1:])}") from None
        if not name:
            raise UsageError(f"{path}: line {line} has no image's name")
        yield name, (a, b, a + c, b + d) if columns is _SIZE_COLUMNS else (a, b, c, d)


def _read_csv(
    shown: str, text: str, *choices: tuple[str, ...]
) -> tuple[tuple[str, ...], list[tuple[int, list[str | None]]]]:
    """Return the first choice of columns that a CSV file has, and these columns by line number; raise UsageError."""
    reader, expected = csv.reader(io.StringIO(text, newline="")), " or ".join(map(",".join, choices))
    try:
        lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UsageError(f"{shown}: not a CSV file ({error}); expected {expected}") from None
    header = [name.strip() for name in lines[0][1]] if lines else []
    columns = next((choice for choice in choices if set(choice) <= set(header)), ())
    if not columns:
        raise UsageError(f"{shown}: columns {', '.join(header)[:80] or 'none'}; expected {expected}")
    positions = [header.index(column) for column in columns]
    return columns, [(line, [row[at] if at < len(row) else None for at in positions]) for line, row in lines[1:]]


@dataclass(frozen=True)
class CocoObject:
    """An annotation of a COCO file.

    Attributes:
        category: the name of its category; empty if it has none.
        segmentation: polygons or run lengths, as the file has them; None without.
        size: (height, width) of the image; None if the file does not say.
    """

    category: str
    box: Box
    segmentation: Any = None
    size: tuple[int, int] | None = None


class _CocoImage(msgspec.Struct):
    id: int | str
    file_name: str
    height: float | None = None
    width: float | None = None


class _CocoAnnotation(msgspec.Struct):
    image_id: int | str
    bbox: tuple[float, float, float, float]
    category_id: int | str | None = None
    segmentation: Any = None


class _CocoCategory(msgspec.Struct):
    id: int | str
    name: str


class _Coco(msgspec.Struct):
    images: list[_CocoImage]
    annotations: list[_CocoAnnotation]
    categories: list[_CocoCategory] = []


def read_objects(path: Path) -> PathLookup[list[CocoObject]]:
    """Read the objects by image in a COCO file, without images that have none.

    Raises:
        UsageError: unreadable, another format, or no objects.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); expected a COCO file") from None
    by_name: dict[str, list[CocoObject]] = {}
    for name, thing in _parse_coco(path, text):
        by_name.setdefault(normalize_name(name), []).append(thing)
    if not by_name:
        raise UsageError(f"{path}: no boxes in it")
    return PathLookup(by_name)


def _parse_coco(path: Path, text: str) -> Iterator[tuple[str, CocoObject]]:
    try:
        # not msgspec's JSON, which refuses the NaN that Python writes
        coco = msgspec.convert(json.loads(text), _Coco, strict=False)
        images = {image.id: image for image in coco.images}
        categories = {category.id: category.name for category in coco.categories}
        for entry in coco.annotations:
            image, (x, y, width, height) = images[entry.image_id], entry.bbox
            size = None if image.height is None or image.width is None else (int(image.height), int(image.width))
            category = "" if entry.category_id is None else categories.get(entry.category_id, "")
            box = (x, y, x + width, y + height)
            yield image.file_name, CocoObject(category, box, entry.segmentation or None, size)
    except (msgspec.ValidationError, KeyError, ValueError, OverflowError, RecursionError) as error:
        expected = "expected images with id and file_name, annotations with image_id and bbox"
        if text.lstrip().startswith("["):
            expected += "; export COCO from Label Studio"
        raise UsageError(f"{path}: not a COCO file ({first_line(error)}); {expected}") from None


def annotate(images: Iterable[InputImage], crops: Crops | None, labels: Labels | None = None) -> Iterator[InputImage]:
    """Yield each image with its crop and its label, or with the error that it has no crop.

    With a detector's boxes, an image is yielded once per box, or not at all. Positions are counted anew, from the first
    image's on.
    """
    position: Iterator[int] | None = None
    for image in images:
        if position is None:
            position = itertools.count(image.index or 0)
        path, error = unescape_name(image.name or ""), image.error
        image_crops: Sequence[Crop] = [Crop(None)]
        if error is None and crops is not None:
            try:
                image_crops = crops.find_all(path)
            except ImageError as no_crop:
                error = no_crop
        label = None if labels is None else labels.find(path)
        for crop, detection in image_crops:
            index = None if image.index is None else next(position)
            yield replace(image, crop=crop, label=label, error=error, index=index, detection=detection)


class FolderLabels:
    """Labels by folder: the label of `a/b/c.jpg` is `b`."""

    identity = FOLDERS

    def find(self, path: str) -> str | None:
        """Return the name of the image's folder; None for a bare file name. A bucket or a server is not a folder."""
        if is_url(path):
            path = path.partition("://")[2].partition("/")[2]
        folder = path.rpartition("/")[0].rpartition("/")[2]
        return folder if folder not in ("", ".", "..") else None

    def unused(self) -> list[str]:
        """Return an empty list: folders have no rows."""
        return []


class FileLabels:
    """The labels of a CSV file, found by an image's path as `PathLookup` does."""

    def __init__(self, by_name: Mapping[str, str], identity: str) -> None:
        self._labels, self._unused, self.identity = PathLookup(by_name), dict.fromkeys(by_name), identity

    def find(self, path: str) -> str | None:
        """Return the label of the only row that may mean the image; None if there is none or several."""
        names = self._labels.matches(path)
        if len(names) != 1:
            return None
        self._unused.pop(names[0], None)
        return self._labels[names[0]]

    def unused(self) -> list[str]:
        """Return the images of the rows that were never found, in the file's order."""
        return list(self._unused)


Labels: TypeAlias = FolderLabels | FileLabels


def read_labels(text: str) -> Labels:
    """Return the labels of `--labels`: `folders`, or a CSV file; raise UsageError if that cannot be used."""
    if text == FOLDERS:
        return FolderLabels()
    if is_url(text):
        raise UsageError(f"--labels {redact(text)}: a URL is not read here; download the file, and give its path")
    path, shown = Path(text), f"--labels {text}"
    try:
        text = read_text(path, "surrogateescape")
        identity = f"{path.name}, sha256 {compute_sha256(path)}"
    except OSError as error:
        expected = "expected `folders`, or a CSV file with the columns image and label"
        raise UsageError(f"{shown}: cannot be read ({error.strerror or error}); {expected}") from None
    by_name: dict[str, str] = {}
    for line, (name, label) in _read_csv(shown, text, ("image", "label"))[1]:
        if not name or not label:
            raise UsageError(f"{shown}: line {line} lacks an image's name or its label")
        name = normalize_name(name)
        if by_name.setdefault(name, label) != label:
            raise UsageError(f"{shown}: two labels for {name}; expected one per image")
    if not by_name:
        raise UsageError(f"{shown}: no labels in it; expected the columns image and label")
    return FileLabels(by_name, identity)
