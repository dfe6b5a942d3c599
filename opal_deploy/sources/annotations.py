"""Boxes and labels of images, read from files and found by the image's path.

Boxes crop an image for the model. They come from a detector (`detections`); from a CSV file with the column `image` and
either `x0,y0,x1,y1` or `x,y,width,height`; from a COCO file: `images` with `id` and `file_name`, `annotations` with
`image_id` and `bbox` [x, y, width, height], one per image; or from CUB-200-2011 and Stanford Dogs (`datasets.boxes`).
All but the detector's are in pixels of the image as a viewer shows it.

Objects are what an image shows. They come from a COCO file (https://cocodataset.org/#format-data), any number per
image; `category_id` and `categories` with `id` and `name` name them. Or they come from Label Studio (`label_studio`).

Labels are the true classes of images. They are the names of the images' folders, or come from a CSV file with the
columns `image` and `label`.
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
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from opal_deploy.artifact.files import compute_sha256, read_text
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.options import DEFAULT_CONFIDENCE
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import unescape_name
from opal_deploy.sources.detections import DETECTIONS_KEY, Crop, Crops, read_detections
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.lookup import PathLookup, normalize_name
from opal_deploy.storage.urls import is_url, redact

# the argument of --labels that means the names of the folders
FOLDERS = "folders"

_CORNER_COLUMNS = ("x0", "y0", "x1", "y1")
_SIZE_COLUMNS = ("x", "y", "width", "height")


class Boxes:
    """The boxes of a file, found by an image's path as `PathLookup` does.

    Args:
        by_name: boxes by image path.
        file_name: what messages call the file.
        identity: a text that differs if boxes may differ.
        by_stem: the names are without suffixes.
        note: see `Crops`.
    """

    def __init__(
        self, by_name: Mapping[str, Box], file_name: str, identity: str, *, by_stem: bool = False, note: str = ""
    ) -> None:
        self._boxes = PathLookup(by_name)
        self._file_name = file_name
        self._by_stem = by_stem
        self.identity = identity
        self.note = note

    def __len__(self) -> int:
        return len(self._boxes)

    def find(self, path: str) -> Box:
        """Return the crop (x0, y0, x1, y1) of the image at `path`, in pixels; raise ImageError (`no_box`)."""
        names = self._boxes.matches(path.removesuffix(PurePosixPath(path).suffix) if self._by_stem else path)
        if len(names) != 1:
            why = "no box" if not names else f"{len(names)} boxes ({names[0]}, {names[1]}, ...)"
            raise ImageError("no_box", f"{self._file_name} has {why} for it")
        return self._boxes[names[0]]

    def find_all(self, path: str) -> list[Crop]:
        """Return the only crop of the image at `path`; raise ImageError (`no_box`)."""
        return [Crop(self.find(path))]

    def count(self, path: str) -> int:
        """Return 1: an image has one record, with a box or with an error."""
        return 1


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
    from opal_deploy.datasets.boxes import CUB_IMAGES, find_box_file, is_cub_boxes, read_cub_boxes

    if os.path.isdir(path):
        file = find_box_file(path)
        return _read_box_folder(path) if file is None else read_boxes(file, confidence)
    expected = (
        "expected a CSV or COCO file, MegaDetector's results, CUB's bounding_boxes.txt, or Stanford Dogs' Annotation "
        "folder"
    )
    try:
        text = read_text(path, "surrogateescape")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); {expected}") from None
    identity = f"{path.name}, sha256 {compute_sha256(path)}"
    if text.lstrip().startswith("{") and f'"{DETECTIONS_KEY}"' in text:
        return read_detections(path, text, identity, confidence)
    if text.lstrip().startswith("{"):
        rows = [(name, thing.box) for name, thing in _parse_coco(path, text)]
    elif is_cub_boxes(text):
        rows = read_cub_boxes(path)
        identity += f"; {CUB_IMAGES}, sha256 {compute_sha256(path.with_name(CUB_IMAGES))}"
    else:
        rows = _read_box_csv(path, text)
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
    name = f"{folder.resolve().name}/"
    digest = hashlib.sha256(json.dumps(boxes).encode()).hexdigest()
    several = sum(len(found) > 1 for found in boxes.values())
    return Boxes(
        {normalize_name(image): found[0] for image, found in boxes.items()},
        name,
        f"{name}, {len(boxes)} annotations, sha256 of their boxes {digest}",
        by_stem=True,
        note=f"--boxes: {several} annotations have several boxes; the first is used, as in training" if several else "",
    )


def _read_box_csv(path: Path, text: str) -> list[tuple[str, Box]]:
    try:
        return _parse_box_rows(path, csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise UsageError(f"{path}: not a CSV file ({error}); expected a CSV or COCO file") from None


def _parse_box_rows(path: Path, reader: csv.DictReader[str]) -> list[tuple[str, Box]]:
    header = [name.strip() for name in reader.fieldnames or []]
    columns = next((c for c in (_CORNER_COLUMNS, _SIZE_COLUMNS) if {"image", *c} <= set(header)), None)
    if columns is None:
        raise UsageError(
            f"{path}: columns {', '.join(header)[:80] or 'none'}; expected image with x0,y0,x1,y1 or x,y,width,height"
        )
    reader.fieldnames = header
    rows = []
    for row in reader:
        try:
            values = [float(row[column]) for column in columns]
        except (TypeError, ValueError):
            raise UsageError(f"{path}: line {reader.line_num} has no four numbers in {', '.join(columns)}") from None
        if not row["image"]:
            raise UsageError(f"{path}: line {reader.line_num} has no image's name")
        rows.append((row["image"], _to_corners(values, has_size=columns is _SIZE_COLUMNS)))
    return rows


@dataclass(frozen=True)
class CocoObject:
    """An annotation of a COCO file, or one in its form.

    Attributes:
        category: the name of its category; empty if it has none.
        segmentation: polygons or run lengths, see `datasets.masks`, as the file has them; None without.
        size: (height, width) of the image; None if the file does not say.
    """

    category: str
    box: Box
    segmentation: Any = None
    size: tuple[int, int] | None = None


def read_objects(path: Path) -> PathLookup[list[CocoObject]]:
    """Read the objects by image in a COCO file or Label Studio's JSON export, without images that have none.

    Raises:
        UsageError: unreadable, another format, or no objects.
    """
    from opal_deploy.sources.label_studio import parse_export

    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read ({error}); expected a COCO file or Label Studio's JSON export"
        ) from None
    by_name: dict[str, list[CocoObject]] = {}
    parse = parse_export if text.lstrip().startswith("[") else _parse_coco
    for name, thing in parse(path, text):
        by_name.setdefault(normalize_name(name), []).append(thing)
    if not by_name:
        raise UsageError(f"{path}: no boxes in it")
    return PathLookup(by_name)


def _parse_coco(path: Path, text: str) -> list[tuple[str, CocoObject]]:
    try:
        document: Any = json.loads(text)
        names = {image["id"]: str(image["file_name"]) for image in document["images"]}
        sizes = {
            image["id"]: (int(image["height"]), int(image["width"]))
            for image in document["images"]
            if image.keys() >= {"height", "width"}
        }
        categories = {entry["id"]: str(entry["name"]) for entry in document.get("categories", [])}
        return [
            (
                names[entry["image_id"]],
                CocoObject(
                    categories.get(entry.get("category_id"), ""),
                    _to_corners([float(value) for value in entry["bbox"]], has_size=True),
                    entry.get("segmentation") or None,
                    sizes.get(entry["image_id"]),
                ),
            )
            for entry in document["annotations"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{path}: not a COCO file ({error!r}); expected images with id and file_name, annotations with image_id "
            "and bbox"
        ) from None


def _to_corners(values: list[float], *, has_size: bool) -> Box:
    a, b, c, d = values
    return (a, b, a + c, b + d) if has_size else (a, b, c, d)


def annotate(images: Iterable[InputImage], crops: Crops | None, labels: Labels | None = None) -> Iterator[InputImage]:
    """Yield each image with its crop and its label, or with the error that it has no crop.

    With a detector's boxes, an image is yielded once per box, or not at all. Positions are counted anew.
    """
    position = itertools.count()
    for image in images:
        path, error = unescape_name(image.name or ""), image.error
        found: Sequence[Crop] = [Crop(None)]
        if error is None and crops is not None:
            try:
                found = crops.find_all(path)
            except ImageError as no_crop:
                error = no_crop
        label = None if labels is None else labels.find(path)
        for crop, detection in found:
            index = None if image.index is None else next(position)
            yield replace(image, crop=crop, label=label, error=error, index=index, detection=detection)


class Labels(Protocol):
    """The labels of images."""

    def find(self, path: str) -> str | None:
        """Return the label of the image at `path`, with `/` between folders; None if it has none."""
        ...

    def unused(self) -> list[str]:
        """Return the images of a file's rows that were never found, in its order."""
        ...

    @property
    def identity(self) -> str:
        """A text that differs if labels may differ."""
        ...


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

    def __init__(self, by_name: dict[str, str], identity: str) -> None:
        self._labels = PathLookup(by_name)
        self._unused = dict.fromkeys(by_name)
        self.identity = identity

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


def read_labels(text: str) -> Labels:
    """Return the labels of `--labels`: `folders`, or a CSV file; raise UsageError if that cannot be used."""
    if text == FOLDERS:
        return FolderLabels()
    if is_url(text):
        raise UsageError(f"--labels {redact(text)}: a URL is not read here; download the file, and give its path")
    path = Path(text)
    expected = "expected `folders`, or a CSV file with the columns image and label"
    try:
        text = read_text(path, "surrogateescape")
        by_name = _parse_label_rows(path, csv.DictReader(io.StringIO(text, newline="")))
        identity = f"{path.name}, sha256 {compute_sha256(path)}"
    except OSError as error:
        raise UsageError(f"--labels {path}: cannot be read ({error.strerror or error}); {expected}") from None
    except csv.Error as error:
        raise UsageError(f"--labels {path}: not a CSV file ({error}); {expected}") from None
    if not by_name:
        raise UsageError(f"--labels {path}: no labels in it; {expected}")
    return FileLabels(by_name, identity)


def _parse_label_rows(path: Path, reader: csv.DictReader[str]) -> dict[str, str]:
    header = [name.strip() for name in reader.fieldnames or []]
    if not {"image", "label"} <= set(header):
        raise UsageError(f"--labels {path}: columns {', '.join(header)[:80] or 'none'}; expected image and label")
    reader.fieldnames = header
    by_name: dict[str, str] = {}
    for row in reader:
        name, label = row["image"], row["label"]
        if not name or not label:
            raise UsageError(f"--labels {path}: line {reader.line_num} lacks an image's name or its label")
        name = normalize_name(name)
        if by_name.setdefault(name, label) != label:
            raise UsageError(f"--labels {path}: two labels for {name}; expected one per image")
    return by_name
