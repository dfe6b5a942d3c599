"""Boxes and labels of images, read from files and found by the image's path.

Boxes crop an image for the model. They come from a CSV file with the column `image` and either `x0,y0,x1,y1` or
`x,y,width,height`; from a COCO file (https://cocodataset.org/#format-data), one per image; from CUB-200-2011's
bounding_boxes.txt; or from MegaDetector's results (https://lila.science/megadetector-output-format), any number per
image. An image is yielded once per box of the category `animal`, and left out without one. All but MegaDetector's boxes
are in pixels of the image as a viewer shows it.

Objects are what an image shows, any number per image, from a COCO file. Labels are the true classes of images: the
names of their folders, or a CSV file with the columns `image` and `label`.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from opal_deploy.artifact.files import compute_sha256, read_text
from opal_deploy.datasets.cub import BOXES, IMAGES, is_cub_boxes, read_cub_boxes
from opal_deploy.datasets.samples import is_skipped, read_csv
from opal_deploy.errors import ImageError, UsageError, first_line
from opal_deploy.options import DEFAULT_CONFIDENCE
from opal_deploy.preprocess.geometry import Box, RelativeBox
from opal_deploy.records.names import unescape_name
from opal_deploy.remote import is_url, redact
from opal_deploy.sources.image import FRAME_NAME, InputImage

T = TypeVar("T")

# the argument of --labels that means the names of the folders
FOLDERS = "folders"

_CORNER_COLUMNS = ("image", "x0", "y0", "x1", "y1")
_SIZE_COLUMNS = ("image", "x", "y", "width", "height")
# tells MegaDetector's results from a COCO file
_DETECTIONS_KEY, _ANIMAL = "detection_categories", "animal"
# raised for JSON with other keys, types and nesting than expected
_NOT_THE_FORMAT = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)


class PathLookup(Generic[T]):
    """Values by image path: the entry `a/b.jpg` is found for `data/a/b.jpg`.

    An entry may have more folders than the path (`data/a/b.jpg` for `a/b.jpg`), if it is the only one that ends in the
    whole path. Names that differ in a folder never match: `x/1.jpg` is not `y/1.jpg`, since a wrong value would go
    unnoticed. A frame without an entry gets its video's value.
    """

    def __init__(self, by_name: Mapping[str, T]) -> None:
        self._by_name = by_name
        self._names_by_file_name: dict[str, list[str]] = {}
        for name in by_name:
            self._names_by_file_name.setdefault(name.rpartition("/")[2], []).append(name)

    def matches(self, path: str) -> list[str]:
        """Return the names that may mean `path`, with `/` between folders: none, one, or several candidates."""
        parts = path.split("/")
        for start in range(len(parts)):
            suffix = "/".join(parts[start:])
            if suffix in self._by_name:
                return [suffix]
        names = [name for name in self._names_by_file_name.get(parts[-1], []) if name.endswith("/" + path)]
        frame = None if names else FRAME_NAME.fullmatch(path)
        return names if frame is None else self.matches(frame[1])

    def __getitem__(self, name: str) -> T:
        return self._by_name[name]


def normalize_name(name: str) -> str:
    """Return a name as an image's name is written: a path without `.` and double slashes, a URL without secrets."""
    return redact(name) if is_url(name) else PurePosixPath(name).as_posix()


class Crop(NamedTuple):
    """A part of an image to classify.

    Attributes:
        box: None: the whole image.
        detection: position of the box among the image's detections, from 0; None for a box of no detector.
        frame: index of the video's frame that the box is for; None: any.
    """

    box: Box | None
    detection: int | None = None
    frame: int | None = None


class Crops(PathLookup[list[Crop]]):
    """The crops of a file by image path.

    Args:
        by_name: crops by image path.
        file_name: what messages call the file.
        identity: a text that differs if boxes may differ.
        note: for a person, in one line, about a detector's crops, any number per image; empty for other crops.
    """

    def __init__(self, by_name: Mapping[str, list[Crop]], file_name: str, identity: str, note: str = "") -> None:
        super().__init__(by_name)
        self._file_name = file_name
        self.identity, self.from_detector, self.note = identity, bool(note), note

    def find_all(self, path: str) -> list[Crop]:
        """Return the crops of the image at `path`; raise ImageError (`no_box`) if the file does not name it."""
        names = self.matches(path)
        if len(names) != 1:
            why = f"{len(names)} boxes for it ({names[0]}, {names[1]}, ...)" if names else "no box for it"
            raise ImageError("no_box", f"{self._file_name} has {why}")
        crops, frame = self[names[0]], FRAME_NAME.fullmatch(path)
        return [crop for crop in crops if frame is None or crop.frame in (None, int(frame[2]))]

    def count(self, path: str) -> int:
        """Return the number of records of an image: one per crop, or 1 for an image that gets an error."""
        try:
            return len(self.find_all(path))
        except ImageError:
            return 1


def read_boxes(path: Path, confidence: float = DEFAULT_CONFIDENCE) -> Crops:
    """Read a CSV or COCO file, MegaDetector's results, or CUB's bounding_boxes.txt.

    Args:
        path: the file, or the folder of CUB.
        confidence: the lowest of a detector's boxes that count, 0 ... 1.

    Raises:
        UsageError: unreadable, other columns or keys, not a number, an image with two boxes.
    """
    path = path / BOXES if (path / BOXES).is_file() else path
    text, identity = _read_file(f"{path}", path, "a CSV or COCO file, or MegaDetector's results")
    if text.lstrip().startswith("{"):
        if f'"{_DETECTIONS_KEY}"' in text:
            return _read_detections(path, text, identity, confidence)
        rows: Iterable[tuple[str, Box]] = ((name, thing.box) for name, thing in _parse_coco(path, text))
    elif is_cub_boxes(text):
        rows = read_cub_boxes(path)
        identity += f"; {IMAGES}, sha256 {compute_sha256(path.with_name(IMAGES))}"
    else:
        rows = _parse_box_rows(path, text)
    by_name: dict[str, list[Crop]] = {}
    for name, box in rows:
        name = normalize_name(name)
        if name in by_name:
            raise UsageError(f"{path}: two boxes for {name}; expected one per image")
        by_name[name] = [Crop(box)]
    if not by_name:
        raise UsageError(f"{path}: no boxes in it")
    return Crops(by_name, path.name, identity)


def _read_file(shown: str, path: Path, expected: str) -> tuple[str, str]:
    """Return a file's text, and a text that identifies its content; raise UsageError."""
    try:
        return read_text(path, "surrogateescape"), f"{path.name}, sha256 {compute_sha256(path)}"
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read ({error.strerror or error}); expected {expected}") from None


def _parse_box_rows(path: Path, text: str) -> Iterator[tuple[str, Box]]:
    for line, columns, (name, *values) in read_csv(f"{path}", text, _CORNER_COLUMNS, _SIZE_COLUMNS):
        try:
            a, b, c, d = (float(value or "") for value in values)
        except ValueError:
            raise UsageError(f"{path}: line {line} has no four numbers in {', '.join(columns[1:])}") from None
        if not name:
            raise UsageError(f"{path}: line {line} has no image's name")
        yield name, (a, b, a + c, b + d) if columns is _SIZE_COLUMNS else (a, b, c, d)


def _read_detections(path: Path, text: str, identity: str, confidence: float) -> Crops:
    """Return the animals with at least a `confidence`, 0 ... 1, in MegaDetector's results; raise UsageError."""
    by_name: dict[str, list[Crop] | None] = {}
    try:
        document = json.loads(text)
        animals = {key for key, name in document[_DETECTIONS_KEY].items() if name == _ANIMAL}
        for image in document["images"]:
            name = normalize_name(image["file"])
            if name in by_name:
                raise UsageError(f"{path}: two entries for {name}; expected one per image")
            # null where the detector failed
            detections = image.get("detections")
            by_name[name] = None if detections is None else list(_find_animals(detections, animals, confidence))
    except _NOT_THE_FORMAT as error:
        expected = "expected format 1.3 to 1.6"
        raise UsageError(f"{path}: not MegaDetector's results ({first_line(error)}); {expected}") from None
    if not animals:
        raise UsageError(f"{path}: {_DETECTIONS_KEY} has no {_ANIMAL}; expected it among the categories")
    if not by_name:
        raise UsageError(f"{path}: no images in it")
    crops = {name: image_crops for name, image_crops in by_name.items() if image_crops is not None}
    counts = list(map(len, crops.values()))
    note = (
        f"--boxes: {sum(counts)} animals with a confidence of at least {confidence:g}, one record each; images "
        f"without such an animal get no record: {counts.count(0)} of {len(counts)}"
    )
    return Crops(crops, path.name, f"{identity}; animals from {confidence:g}", note)


def _find_animals(detections: list[dict[str, Any]], animals: set[str], confidence: float) -> Iterator[Crop]:
    for number, detection in enumerate(detections):
        # shares of the oriented image
        x, y, width, height = map(float, detection["bbox"])
        if detection["category"] in animals and float(detection["conf"]) >= confidence:
            yield Crop(RelativeBox(x, y, x + width, y + height), number, detection.get("frame_number"))


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


def read_objects(path: Path) -> PathLookup[list[CocoObject]]:
    """Read the objects by image in a COCO file, without images that have none.

    Raises:
        UsageError: unreadable, another format, or no objects.
    """
    by_name: dict[str, list[CocoObject]] = {}
    for name, thing in _parse_coco(path, _read_file(f"{path}", path, "a COCO file")[0]):
        by_name.setdefault(normalize_name(name), []).append(thing)
    if not by_name:
        raise UsageError(f"{path}: no boxes in it")
    return PathLookup(by_name)


def _parse_coco(path: Path, text: str) -> Iterator[tuple[str, CocoObject]]:
    try:
        document = json.loads(text)
        images = {image["id"]: image for image in document["images"]}
        categories = {category["id"]: f"{category['name']}" for category in document.get("categories", ())}
        for entry in document["annotations"]:
            image = images[entry["image_id"]]
            x, y, width, height = map(float, entry["bbox"])
            sides = [image.get(side) for side in ("height", "width")]
            size = None if None in sides else (int(sides[0]), int(sides[1]))
            category = categories.get(entry.get("category_id"), "")
            box = (x, y, x + width, y + height)
            yield f"{image['file_name']}", CocoObject(category, box, entry.get("segmentation") or None, size)
    except _NOT_THE_FORMAT as error:
        expected = "expected images with id and file_name, annotations with image_id and bbox"
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
        image_crops = [Crop(None)]
        if error is None and crops is not None:
            try:
                image_crops = crops.find_all(path)
            except ImageError as no_crop:
                error = no_crop
        label = None if labels is None else labels.find(path)
        for crop in image_crops:
            index = None if image.index is None else next(position)
            yield replace(image, crop=crop.box, label=label, error=error, index=index, detection=crop.detection)


class FolderLabels:
    """Labels by folder: the label of `a/b/c.jpg` is `b`."""

    identity = FOLDERS

    @staticmethod
    def fit(images: Sequence[str], class_names: Collection[str]) -> bool:
        """Return whether the only input is a folder that holds nothing but folders named as classes, two at least."""
        if len(images) != 1 or is_url(images[0]) or not (folder := Path(images[0])).is_dir():
            return False
        inner = [path for path in folder.iterdir() if not is_skipped(path)]
        names = {unicodedata.normalize("NFC", path.name) for path in inner if path.is_dir()}
        return 1 < len(names) == len(inner) and names <= {*class_names}

    def find(self, path: str) -> str | None:
        """Return the name of the image's folder; None for a bare file name. A bucket is not a folder."""
        if is_url(path):
            path = path.partition("://")[2].partition("/")[2]
        folder = unicodedata.normalize("NFC", path.rpartition("/")[0].rpartition("/")[2])
        return folder if folder not in ("", ".", "..") else None

    def unused(self) -> list[str]:
        """Return an empty list: folders have no rows."""
        return []


class FileLabels(PathLookup[str]):
    """The labels of a CSV file by image path."""

    def __init__(self, by_name: Mapping[str, str], identity: str) -> None:
        super().__init__(by_name)
        self._unused, self.identity = dict.fromkeys(by_name), identity

    def find(self, path: str) -> str | None:
        """Return the label of the only row that may mean the image; None if there is none or several."""
        names = self.matches(path)
        if len(names) != 1:
            return None
        self._unused.pop(names[0], None)
        return self[names[0]]

    def unused(self) -> list[str]:
        """Return the images of the rows that were never found, in the file's order."""
        return list(self._unused)


Labels: TypeAlias = FolderLabels | FileLabels


def read_labels(text: str) -> Labels:
    """Return the labels of `--labels`: `folders`, or a CSV file; raise UsageError if that cannot be used."""
    if text == FOLDERS:
        return FolderLabels()
    shown = f"--labels {redact(text)}"
    content, identity = _read_file(shown, Path(text), "`folders`, or a CSV file with the columns image and label")
    by_name: dict[str, str] = {}
    for line, _, (name, label) in read_csv(shown, content, ("image", "label")):
        if not name or not label:
            raise UsageError(f"{shown}: line {line} lacks an image's name or its label")
        name = normalize_name(name)
        if by_name.setdefault(name, label) != label:
            raise UsageError(f"{shown}: two labels for {name}; expected one per image")
    if not by_name:
        raise UsageError(f"{shown}: no labels in it; expected the columns image and label")
    return FileLabels(by_name, identity)
