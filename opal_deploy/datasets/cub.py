"""CUB-200-2011: 200 species of birds, cropped to their boxes in training and in test, as in the paper.

    images.txt              <image id> <path under images/>
    image_class_labels.txt  <image id> <class id>
    train_test_split.txt    <image id> <1 for training, 0 for test>
    bounding_boxes.txt      <image id> <x> <y> <width> <height>, pixels
    classes.txt             <class id> <name>
    parts/parts.txt         <part id> <name>
    parts/part_locs.txt     <image id> <part id> <x> <y> <1 if visible>, pixels of the whole image

Ids count from 1. The official split is used; it has no validation images. The fifteen parts are for evaluation only
(`read_parts`) and may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opal_deploy.datasets.samples import DataSet, Sample, build_dataset, pluralize, read_text, shorten_list
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

IMAGES, BOXES = "images.txt", "bounding_boxes.txt"
_TABLES = (IMAGES, "image_class_labels.txt", "train_test_split.txt", "classes.txt")
FILES = (*_TABLES, BOXES)
_PART_LOCATIONS = Path("parts") / "part_locs.txt"
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
ADVICE = "unpack the official archive again, or fix its tables; evaluate --no-parts leaves out those of the parts"


def read_cub(folder: Path) -> DataSet:
    """Read the lists; UsageError where they do not fit each other."""
    images, labels, flags, classes = (read_table(folder / table, 1) for table in _TABLES)
    boxes = read_table(folder / BOXES, 4)
    ids = sorted(classes, key=int)
    splits: dict[str, list[Sample]] = {"train": [], "test": []}
    for key, (name,) in images.items():
        try:
            split = {"1": "train", "0": "test"}[flags[key][0]]
            sample = Sample(folder / "images" / name, ids.index(labels[key][0]), to_corners(boxes[key]))
        except (KeyError, ValueError) as error:
            message = f"{folder}: image id {key}: no line, class or flag in some table ({error}); {ADVICE}"
            raise UsageError(message) from None
        splits[split].append(sample)
    return build_dataset("cub", folder, [classes[key][0] for key in ids], splits, crop="boxes")


def read_table(path: Path, num_values: int, *, num_ids: int = 1) -> dict[str, list[str]]:
    """Return ids (joined by spaces) to values of one of CUB's tables, in the file's order.

    A line has `num_ids` ids, then `num_values` values: a single one is text and may hold spaces, several are numbers.
    UsageError: the table cannot be read, or is in another format.
    """
    rows: dict[str, list[str]] = {}
    pattern = r"\s+".join([r"(\d+)"] * num_ids + [_NUMBER if num_values > 1 else "(.+)"] * num_values)
    for number, line in enumerate(read_text(path, ADVICE).splitlines(), 1):
        match = re.fullmatch(pattern, line.strip())
        words = match.groups() if match else ()
        key = " ".join(str(int(word)) for word in words[:num_ids])
        if match and key not in rows:
            rows[key] = list(words[num_ids:])
        elif line.strip():
            raise UsageError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not CUB's format, ids that are new ({num_ids}) and "
                f"values ({num_values}) separated by spaces; {ADVICE}"
            )
    if not rows:
        raise UsageError(f"{path}: the table is empty; {ADVICE}")
    return rows


def to_corners(box: Sequence[str]) -> Box:
    """Return (x0, y0, x1, y1) for a row (x, y, width, height) of bounding_boxes.txt."""
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def is_cub_boxes(text: str) -> bool:
    """Return whether a text starts like CUB's bounding_boxes.txt, with a line of an id and four numbers."""
    return re.match(rf"\s*\d+(?:[ \t]+{_NUMBER}){{4}}\s*(\n|$)", text) is not None


def read_cub_boxes(path: Path) -> list[tuple[str, Box]]:
    """Return (path under the images' folder, box) of every image in CUB's bounding_boxes.txt.

    UsageError: images.txt is not next to the file or lacks some of its ids, or a table is not CUB's.
    """
    boxes, names = read_table(path, 4), read_table(path.with_name(IMAGES), 1)
    if unknown := [key for key in boxes if key not in names]:
        ids = pluralize(len(unknown), "image id", "image ids")
        raise UsageError(f"{path}: {ids} that {IMAGES} next to it does not name: {shorten_list(unknown)}")
    return [(names[key][0], to_corners(values)) for key, values in boxes.items()]


@dataclass(frozen=True)
class PartLocations:
    """The P parts of N images."""

    names: tuple[str, ...]  # P names, such as `left eye`
    points: NDArray[np.float64]  # [N, P, 2], (x, y) in pixels of the whole image; (0, 0) where a part is not visible
    visible: NDArray[np.bool_]  # [N, P]
    boxes: NDArray[np.float64]  # [N, 4], (x, y, width, height) of the bird in pixels, width and height at least 1

    def input_points(self, size: int, crops: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64 [N, P, 2], (x, y) of the parts on crops [N, 4] resized to size x size; may lie outside.

        A crop is (x0, y0, x1, y1), the region of the image that the model sees.
        """
        corner, extent = crops[:, None, :2], crops[:, None, 2:] - crops[:, None, :2]
        return np.asarray(size * ((self.points - corner) / extent))

    def truncated_input_points(self, size: int) -> NDArray[np.int64]:
        """Return int64 [N, P, 2], (x, y) of the parts on their boxes, with part, box and result truncated toward zero.

        This is the rounding of the published evaluation protocol (Huang et al. 2023). Its frame is the whole box, even
        where the box leaves the image.
        """
        boxes = np.trunc(self.boxes)
        truncated = replace(self, points=np.trunc(self.points))
        points = truncated.input_points(size, np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1))
        return np.trunc(points).astype(np.int64)


def has_parts(data: DataSet) -> bool:
    """Return whether a data set is CUB with part locations."""
    return data.layout == "cub" and (data.root / _PART_LOCATIONS).is_file()


def read_parts(root: Path, samples: Sequence[Sample]) -> PartLocations:
    """Return the parts of N samples of CUB's folder `root`, row for row.

    UsageError: a table is missing or not CUB's, or lacks some of the images.
    """
    parts = read_table(root / "parts" / "parts.txt", 1)
    keys = {root / "images" / name: key for key, (name,) in read_table(root / IMAGES, 1).items()}
    boxes = read_table(root / BOXES, 4)
    locations = read_table(root / _PART_LOCATIONS, 3, num_ids=2)
    try:
        ids = [keys[sample.path] for sample in samples]
        sizes = np.array([boxes[key] for key in ids], np.float64).reshape(-1, 4)
        rows = [locations[f"{key} {part}"] for key in ids for part in parts]
    except KeyError as error:
        raise UsageError(f"{root}: the tables of parts lack a line of {error}; {ADVICE}") from None
    if small := [key for key, size in zip(ids, sizes[:, 2:], strict=True) if size.min() < 1]:
        raise UsageError(f"{root / BOXES}: boxes of less than a pixel: {shorten_list(small)}; {ADVICE}")
    values = np.array(rows, np.float64).reshape(len(ids), len(parts), 3)
    return PartLocations(tuple(name for (name,) in parts.values()), values[..., :2], values[..., 2] == 1, sizes)
