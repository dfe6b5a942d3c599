"""CUB-200-2011: 200 species of birds, cropped to their boxes in training and in test, as in the paper; and a subset.

    images.txt              <image id> <path under images/>
    image_class_labels.txt  <image id> <class id>
    train_test_split.txt    <image id> <1 for training, 0 for test>
    bounding_boxes.txt      <image id> <x> <y> <width> <height>, pixels
    classes.txt             <class id> <name>
    parts/parts.txt         <part id> <name>
    parts/part_locs.txt     <image id> <part id> <x> <y> <1 if visible>, pixels of the whole image

Ids count from 1. The official split is used; it has no validation images. The fifteen parts are for evaluation only
(`read_parts`) and may be absent.

`cub100` is a course's subset: 100 classes, images resized to 227x227, comma-separated tables, ids from 0, no boxes.
There the flag is 1 for TEST and 0 for training: the subset's README calls it "is training", but counts 2,999 training
images, as many as there are zeros.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opal_deploy.datasets.listing import (
    Adapter,
    Listing,
    find_escaping_paths,
    has_files,
    is_decimal,
    is_path_inside,
    missing_files,
    read_text,
    require_files,
    unreadable_error,
)
from opal_deploy.datasets.samples import DataSet, Sample, pluralize, shorten_list
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

_IMAGES, _LABELS, _SPLIT, _CLASSES = "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"
_BOXES = "bounding_boxes.txt"
_PART_NAMES = Path("parts") / "parts.txt"
_PART_LOCATIONS = Path("parts") / "part_locs.txt"

_ADVICE = "unpack the official archive again, or fix its tables"
_PARTS_ADVICE = "fix it, or leave the parts out with --no-parts"

# an image id with a comma after it, as in `cub100`
_COMMA = re.compile(r"\s*\d+\s*,")


def _is_cub(folder: Path) -> bool:
    return _has_tables(folder) and not _is_comma_separated(folder)


def _is_cub100(folder: Path) -> bool:
    return _has_tables(folder) and _is_comma_separated(folder)


def _has_tables(folder: Path) -> bool:
    """Return whether the folder has the tables that CUB and `cub100` share; no ImageFolder has them."""
    return has_files(folder, _IMAGES, _LABELS)


def _is_comma_separated(folder: Path) -> bool:
    with (folder / _IMAGES).open(encoding="utf-8-sig", errors="replace") as file:
        return _COMMA.match(file.readline()) is not None


def _read_cub(folder: Path, *, subset: bool = False) -> Listing:
    """Read the tables of CUB, or of `cub100`; an image that some table lacks becomes a problem.

    Raises:
        UsageError: tables are missing or in another format.
    """
    names = [_IMAGES, _LABELS, _SPLIT, *([] if subset else [_BOXES]), _CLASSES]
    title = "the 100-class subset of CUB" if subset else "CUB-200-2011"
    advice = "unpack the official archive again, or give the images as DATA/train/<class> and DATA/test/<class>"
    require_files(folder, title, missing_files(folder, names), advice)
    separator = "," if subset else None
    tables = {name: read_table(folder / name, 4 if name == _BOXES else 1, separator) for name in names}
    classes = tables[_CLASSES]
    labels = {class_id: label for label, class_id in enumerate(sorted(classes, key=int))}
    # by flag
    splits: dict[str, list[Sample]] = {"0": [], "1": []}
    for image_id, (name,) in tables[_IMAGES].items():
        class_id, flag = (tables[table].get(image_id, [""])[0] for table in (_LABELS, _SPLIT))
        box = None if subset else tables[_BOXES].get(image_id)
        if not (subset or box) or class_id not in labels or flag not in splits or not is_path_inside(name):
            continue  # reported by _find_mismatches
        splits[flag].append(Sample(folder / "images" / name, labels[class_id], to_corners(box) if box else None))
    class_names = [classes[class_id][0] for class_id in labels]
    train, test = (splits["0"], splits["1"]) if subset else (splits["1"], splits["0"])
    data = DataSet(folder, "cub100", class_names, train, [], test)
    if not subset:
        data = replace(data, layout="cub", crop="boxes")
    return Listing(data, _find_mismatches(tables), (folder / "images",), _ADVICE)


def read_table(
    path: Path, num_values: int, separator: str | None = None, *, num_ids: int = 1, advice: str = _ADVICE
) -> dict[str, list[str]]:
    """Return ids (joined by spaces) to values of one of CUB's tables, in the file's order.

    Args:
        path: the table.
        num_values: values per line after the ids. A single value is text and may hold spaces; several are numbers.
        separator: None for spaces and tabs.
        num_ids: ids at the beginning of each line.
        advice: what to do about a damaged table, completing "...; ".

    Raises:
        UsageError: the table cannot be read, or is in another format.
    """
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path, advice).splitlines(), 1):
        if not line.strip():
            continue
        words = [word.strip() for word in line.split(separator, maxsplit=1 if num_values == 1 else -1)]
        ids, values = words[:num_ids], words[num_ids:]
        key = " ".join(ids)
        is_valid = all(map(is_decimal, ids)) and key not in rows and len(values) == num_values and all(values)
        if not is_valid or (num_values > 1 and not _are_finite(values)):
            expected = f"{pluralize(num_ids, 'new numeric id', 'new numeric ids')} and {num_values}"
            raise UsageError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not CUB's format, {expected} "
                f"{'value' if num_values == 1 else 'numbers'} separated by {'a comma' if separator else 'spaces'}; "
                f"{advice}"
            )
        rows[key] = values
    if not rows:
        raise UsageError(f"{path}: the table is empty; {advice}")
    return rows


def _are_finite(values: list[str]) -> bool:
    try:
        return all(math.isfinite(float(value)) for value in values)
    except ValueError:
        return False


def to_corners(box: Sequence[str]) -> Box:
    """Return (x0, y0, x1, y1) for a row (x, y, width, height) of bounding_boxes.txt."""
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def _find_mismatches(tables: dict[str, dict[str, list[str]]]) -> list[str]:
    images, classes = tables[_IMAGES], tables[_CLASSES]
    problems = find_escaping_paths((name for (name,) in images.values()), _IMAGES, "images")
    if duplicates := [name for name, number in Counter(name for (name,) in classes.values()).items() if number > 1]:
        problems.append(f"several classes with the same name in {_CLASSES}: {shorten_list(duplicates)}")
    for name in (name for name in tables if name not in (_IMAGES, _CLASSES)):
        for has, lacks in ((name, _IMAGES), (_IMAGES, name)):
            if ids := [key for key in tables[has] if key not in tables[lacks]]:
                are = pluralize(len(ids), f"id of {has} is", f"ids of {has} are")
                problems.append(f"{are} not in {lacks}: {shorten_list(ids)}")
    if flags := sorted({flag for (flag,) in tables[_SPLIT].values()} - {"0", "1"}):
        problems.append(f"{_SPLIT} holds {shorten_list(flags)} besides 0 and 1")
    if unknown := sorted({class_id for (class_id,) in tables[_LABELS].values()} - classes.keys()):
        problems.append(f"class ids that {_CLASSES} does not name: {shorten_list(unknown)}")
    return problems


CUB = Adapter("cub", "CUB-200-2011", _is_cub, _read_cub, ("CUB_200_2011",))
_SUBSET_TITLE = "the 100-class subset of CUB-200-2011 at 227x227"
CUB100 = Adapter("cub100", _SUBSET_TITLE, _is_cub100, partial(_read_cub, subset=True), ("cub100_227px",))


# parts ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartLocations:
    """The P parts of N images.

    Attributes:
        names: P names, such as `left eye`.
        points: float64 [N, P, 2], (x, y) in pixels of the whole image; (0, 0) where a part is not visible.
        visible: bool [N, P].
        boxes: float64 [N, 4], (x, y, width, height) of the bird in pixels, width and height at least 1.
    """

    names: tuple[str, ...]
    points: NDArray[np.float64]
    visible: NDArray[np.bool_]
    boxes: NDArray[np.float64]

    def input_points(self, size: int, crops: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64 [N, P, 2], (x, y) of the parts on crops [N, 4] resized to size x size; may lie outside.

        A crop is (x0, y0, x1, y1), the region of the image that the model sees.
        """
        corner, extent = crops[:, None, :2], crops[:, None, 2:] - crops[:, None, :2]
        points: NDArray[np.float64] = size * ((self.points - corner) / extent)
        return points

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
    """Return whether a data set is CUB with part locations.

    Raises:
        UsageError: the folder may not be read.
    """
    try:
        return data.layout == "cub" and (data.root / _PART_LOCATIONS).is_file()
    except OSError as error:
        raise unreadable_error(error, data.root / _PART_LOCATIONS, _PARTS_ADVICE) from None


def read_parts(root: Path, samples: Sequence[Sample]) -> PartLocations:
    """Return the parts of N samples, row for row.

    Args:
        root: CUB's folder.
        samples: samples of that folder.

    Raises:
        UsageError: a table is missing or not CUB's, or lacks some of the images.
    """
    part_names = read_table(root / _PART_NAMES, 1, advice=_PARTS_ADVICE)
    ids_by_name = {name: key for key, (name,) in read_table(root / _IMAGES, 1, advice=_PARTS_ADVICE).items()}
    ids = []
    for sample in samples:
        name = sample.path.relative_to(root / "images").as_posix()
        if name not in ids_by_name:
            raise UsageError(f"{root}: {_IMAGES} lacks {name}, so its parts are unknown; {_PARTS_ADVICE}")
        ids.append(ids_by_name[name])
    boxes = _read_rows(root / _BOXES, [[i] for i in ids], 4, num_ids=1)[:, 0]
    part_keys = [[f"{i} {part}" for part in part_names] for i in ids]
    locations = _read_rows(root / _PART_LOCATIONS, part_keys, 3, num_ids=2)
    if small := [i for i, box in zip(ids, boxes, strict=True) if min(box[2:]) < 1]:
        raise UsageError(
            f"{root / _BOXES}: boxes of less than a pixel for image ids {shorten_list(small)}; {_PARTS_ADVICE}"
        )
    names = tuple(name for (name,) in part_names.values())
    return PartLocations(names, locations[..., :2], locations[..., 2] == 1, boxes)


def _read_rows(path: Path, keys: list[list[str]], num_values: int, *, num_ids: int) -> NDArray[np.float64]:
    """Return float64 [N, P, num_values], the numbers of a table for `keys` [N][P]."""
    table = read_table(path, num_values, num_ids=num_ids, advice=_PARTS_ADVICE)
    if missing := [row[0].split()[0] for row in keys if any(key not in table for key in row)]:
        ids = pluralize(len(missing), "image id", "image ids")
        raise UsageError(f"{path}: it lacks lines of {ids}: {shorten_list(missing)}; {_PARTS_ADVICE}")
    rows = [[[float(value) for value in table[key]] for key in row] for row in keys]
    return np.array(rows, dtype=np.float64).reshape(len(keys), -1, num_values)
