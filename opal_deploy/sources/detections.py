"""Crops of images: boxes from a table, one per image, or from MegaDetector's results, any number per image.

See https://lila.science/megadetector-output-format. Boxes of the category `animal` count from a confidence on. An image
is yielded once per such box. Images without a detected animal are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

import msgspec

from opal_deploy.errors import ImageError, UsageError, first_line
from opal_deploy.logs import one_line
from opal_deploy.preprocess.geometry import Box, RelativeBox
from opal_deploy.sources.items import FRAME_NAME, PathLookup, normalize_name

# tells MegaDetector's results from a COCO file
DETECTIONS_KEY = "detection_categories"
_ANIMAL = "animal"


class Crop(NamedTuple):
    """A part of an image to classify.

    Attributes:
        box: None: the whole image.
        detection: position of the box among the image's detections, from 0; None for a box of no detector.
    """

    box: Box | None
    detection: int | None = None


class Boxes:
    """The boxes of a file, one per image, found by an image's path as `PathLookup` does.

    Args:
        by_name: boxes by image path.
        file_name: what messages call the file.
        identity: a text that differs if boxes may differ.
        by_stem: the names are without suffixes.
        note: a note about the file for a person, in one line; empty for none.
    """

    def __init__(
        self, by_name: Mapping[str, Box], file_name: str, identity: str, *, by_stem: bool = False, note: str = ""
    ) -> None:
        self._boxes, self._file_name, self._by_stem = PathLookup(by_name), file_name, by_stem
        self.identity, self.note = identity, note

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
        """Return the number of records of an image: 1, with a box or with an error."""
        return 1


class _Detection(msgspec.Struct, frozen=True):
    category: str
    conf: float
    # [x, y, width, height], shares of the oriented image
    bbox: tuple[float, float, float, float]
    frame_number: int | None = None


class _Image(msgspec.Struct, frozen=True):
    file: str
    detections: list[_Detection] | None = None
    failure: str | None = None


class _Results(msgspec.Struct, frozen=True):
    images: list[_Image]
    detection_categories: dict[str, str]


class Detections:
    """The animals of a detector's results, found by an image's path as `PathLookup` does; see `Boxes`."""

    def __init__(self, results: _Results, file_name: str, identity: str, confidence: float) -> None:
        images = {normalize_name(image.file): image for image in results.images}
        self._images = PathLookup(images)
        self._animals = {key for key, name in results.detection_categories.items() if name == _ANIMAL}
        self._file_name, self._confidence = file_name, confidence
        self.identity = f"{identity}; animals from {confidence:g}"
        counts = [len(self._choose(image, None)) for image in images.values() if image.failure is None]
        self.note = (
            f"--boxes: {sum(counts)} animals with a confidence of at least {confidence:g}, one record each; images "
            f"without such an animal get no record: {counts.count(0)} of {len(counts)}"
        )

    def find_all(self, path: str) -> list[Crop]:
        """Return the animals in the image at `path`; raise ImageError (`no_box`) if the detector did not see it."""
        names = self._images.matches(path)
        if len(names) != 1:
            why = f"{len(names)} images ({names[0]}, {names[1]}, ...) for it" if names else "no such image"
            raise ImageError("no_box", f"{self._file_name} has {why}")
        image, frame = self._images[names[0]], FRAME_NAME.fullmatch(path)
        if image.failure is not None:
            raise ImageError("no_box", f"the detector failed on it: {one_line(image.failure)}")
        return self._choose(image, None if frame is None else int(frame[2]))

    def count(self, path: str) -> int:
        """Return the number of animals, or 1 for an image that gets an error."""
        try:
            return len(self.find_all(path))
        except ImageError:
            return 1

    def _choose(self, image: _Image, frame: int | None) -> list[Crop]:
        return [
            Crop(RelativeBox(x, y, x + width, y + height), number)
            for number, detection in enumerate(image.detections or ())
            for x, y, width, height in [detection.bbox]
            if detection.category in self._animals and detection.conf >= self._confidence
            if frame is None or detection.frame_number in (None, frame)
        ]


Crops: TypeAlias = Boxes | Detections


def read_detections(path: Path, text: str, identity: str, confidence: float) -> Detections:
    """Return the animals with at least a `confidence`, 0 ... 1, in results with this `text`; raise UsageError."""
    try:
        results = msgspec.json.decode(text, type=_Results)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        expected = "expected format 1.3 to 1.6"
        raise UsageError(f"{path}: not MegaDetector's results ({first_line(error)}); {expected}") from None
    if not results.images:
        raise UsageError(f"{path}: no images in it")
    name, entries = Counter(normalize_name(image.file) for image in results.images).most_common(1)[0]
    if entries > 1:
        raise UsageError(f"{path}: {entries} entries for {name}; expected one per image")
    if _ANIMAL not in results.detection_categories.values():
        categories = ", ".join(results.detection_categories.values())[:80] or "none"
        raise UsageError(f"{path}: detection_categories are {categories}; expected {_ANIMAL} among them")
    return Detections(results, path.name, identity, confidence)
