"""CUB-200-2011: 200 species of birds, cropped to their boxes in training and in test, as in the paper.

    images.txt              <image id> <path under images/>
    image_class_labels.txt  <image id> <class id>
    train_test_split.txt    <image id> <1 for training, 0 for test>
    bounding_boxes.txt      <image id> <x> <y> <width> <height>, pixels
    classes.txt             <class id> <name>
    parts/parts.txt         <part id> <name>
    parts/part_locs.txt     <image id> <part id> <x> <y> <1 if visible>, pixels of the whole image

Ids count from 1. The official split, which has no validation images. The fifteen parts serve evaluation only
(`read_parts`) and may be absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opal_deploy.datasets.listing import (
    Adapter,
    Listing,
    find_duplicate_names,
    find_escaping_paths,
    find_id_mismatches,
    has_files,
    is_decimal,
    is_path_inside,
    missing_files,
    read_all,
    read_text,
    require_files,
    unreadable_error,
)
from opal_deploy.datasets.samples import DataSet, Sample, pluralize, shorten_list
from opal_deploy.errors import UsageError

# table name, and the number of values that a line has after the id
_TABLES = {
    "images.txt": 1,
    "image_class_labels.txt": 1,
    "train_test_split.txt": 1,
    "bounding_boxes.txt": 4,
    "classes.txt": 1,
}
_PART_NAMES = Path("parts") / "parts.txt"
_PART_LOCATIONS = Path("parts") / "part_locs.txt"

_ADVICE = "unpack the official archive again, or mend its tables"
_PARTS_ADVICE = "mend it, or leave the parts out with --no-parts"

# an image id with a comma behind it, as in the format of `cub100`
_COMMA = re.compile(r"\s*\d+\s*,")


def _is_cub(folder: Path) -> bool:
    return has_cub_tables(folder) and not is_comma_separated(folder)


def has_cub_tables(folder: Path) -> bool:
    """Return whether the folder has the tables that CUB and its subset `cub100` share; no ImageFolder has them."""
    return has_files(folder, "images.txt", "image_class_labels.txt")


def is_comma_separated(folder: Path) -> bool:
    """Return whether images.txt has commas after its ids."""
    with (folder / "images.txt").open(encoding="utf-8-sig", errors="replace") as file:
        return _COMMA.match(file.readline()) is not None


def _read_cub(folder: Path) -> Listing:
    """Read the tables; an image that some table lacks becomes a problem.

    Raises:
        UsageError: tables are missing or not in CUB's format.
    """
    require_files(
        folder,
        "CUB-200-2011",
        missing_files(folder, _TABLES),
        "unpack the official archive again, or give the images as DATA/train/<class> and DATA/test/<class>",
    )
    tables = read_all({name: partial(read_table, folder / name, values) for name, values in _TABLES.items()})
    labels = {class_id: label for label, class_id in enumerate(tables["classes.txt"])}
    splits: dict[str, list[Sample]] = {"0": [], "1": []}
    for image_id, (name,) in tables["images.txt"].items():
        others = (tables[table].get(image_id) for table in ("image_class_labels.txt", "train_test_split.txt"))
        class_id, flag = (values[0] if values else "" for values in others)
        box = tables["bounding_boxes.txt"].get(image_id)
        if box is None or class_id not in labels or flag not in splits or not is_path_inside(name):
            continue  # reported by _find_mismatches
        x, y, width, height = (float(value) for value in box)
        splits[flag].append(Sample(folder / "images" / name, labels[class_id], (x, y, x + width, y + height)))
    class_names = [values[0] for values in tables["classes.txt"].values()]
    return Listing(
        DataSet(folder, "cub", class_names, splits["1"], [], splits["0"], crop="boxes"),
        _find_mismatches(tables),
        (folder / "images",),
        _ADVICE,
    )


def read_table(path: Path, num_values: int) -> dict[str, list[str]]:
    """Return id to values of one of CUB's tables, in the file's order; a single value may hold spaces.

    Raises:
        UsageError: it cannot be read, or is not in CUB's format.
    """
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path, _ADVICE).splitlines(), 1):
        if not line.strip():
            continue
        key, *values = line.split(maxsplit=1) if num_values == 1 else line.split()
        values = [value.strip() for value in values]
        is_box = num_values == 4
        # an id that is no plain number means another format, such as the comma-separated one of `cub100`
        if not is_decimal(key) or len(values) != num_values or key in rows or (is_box and not _are_finite(values)):
            raise UsageError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not CUB's format, a new numeric id and "
                f"{pluralize(num_values, 'value', 'values')} separated by spaces; {_ADVICE}"
            )
        rows[key] = values
    if not rows:
        raise UsageError(f"{path}: the table is empty; {_ADVICE}")
    return rows


def _are_finite(values: list[str]) -> bool:
    try:
        return all(math.isfinite(float(value)) for value in values)
    except ValueError:
        return False


def _find_mismatches(tables: dict[str, dict[str, list[str]]]) -> list[str]:
    images, classes = tables["images.txt"], tables["classes.txt"]
    problems = find_escaping_paths((name for (name,) in images.values()), "images.txt", "images")
    problems += find_duplicate_names([name for (name,) in classes.values()], "classes.txt")
    for name in ("image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt"):
        table = tables[name]
        extra = [key for key in table if key not in images]
        missing = [key for key in images if key not in table]
        problems += find_id_mismatches(name, "images.txt", extra, missing)
    flags = sorted({values[0] for values in tables["train_test_split.txt"].values()} - {"0", "1"})
    if flags:
        problems.append(f"train_test_split.txt holds {shorten_list(flags)} beside 0 and 1")
    unknown = sorted({values[0] for values in tables["image_class_labels.txt"].values()} - classes.keys())
    if unknown:
        problems.append(f"class ids that classes.txt does not name: {shorten_list(unknown)}")
    return problems


CUB = Adapter("cub", "CUB-200-2011", _is_cub, lambda folder, partition: _read_cub(folder), ("CUB_200_2011",))


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
        """Return float64 [N, P, 2], (x, y) of the parts on crops resized to size x size pixels; may lie outside.

        Args:
            size: of the input.
            crops: [N, 4], (x0, y0, x1, y1) of the part of each image that the model sees.
        """
        corner, extent = crops[:, None, :2], crops[:, None, 2:] - crops[:, None, :2]
        points: NDArray[np.float64] = size * ((self.points - corner) / extent)
        return points

    def truncated_input_points(self, size: int) -> NDArray[np.int64]:
        """Return int64 [N, P, 2], (x, y) of the parts on their boxes, with part, box and result truncated toward zero.

        This is the rounding of the published evaluation protocol (Huang et al. 2023). Its frame is the whole box, where
        the box leaves the image too.
        """
        boxes = np.trunc(self.boxes)
        truncated = replace(self, points=np.trunc(self.points))
        points = truncated.input_points(size, np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1))
        return np.trunc(points).astype(np.int64)


def has_parts(data: DataSet) -> bool:
    """Return whether a data set is CUB with part locations, which `read_parts` can read.

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
    part_names = _read_part_names(root / _PART_NAMES)
    ids_by_name = {name: int(key) for key, name in _read_id_names(root / "images.txt")}
    ids = []
    for sample in samples:
        name = sample.path.relative_to(root / "images").as_posix()
        if name not in ids_by_name:
            raise UsageError(f"{root}: images.txt does not have {name}, so its parts are unknown; {_PARTS_ADVICE}")
        ids.append(ids_by_name[name])
    boxes_path = root / "bounding_boxes.txt"
    boxes = _read_rows(boxes_path, [[(i,)] for i in ids], num_ids=1)  # [N, 1, 4]
    part_keys = [[(i, part) for part in part_names] for i in ids]
    locations = _read_rows(root / _PART_LOCATIONS, part_keys, num_ids=2)  # [N, P, 3]
    small = [str(i) for i, box in zip(ids, boxes[:, 0], strict=True) if min(box[2:]) < 1]
    if small:
        raise UsageError(
            f"{boxes_path}: boxes of less than a pixel for image ids {shorten_list(small)}; {_PARTS_ADVICE}"
        )
    return PartLocations(tuple(part_names.values()), locations[..., :2], locations[..., 2] == 1, boxes[:, 0])


def _read_rows(path: Path, keys: Sequence[Sequence[tuple[int, ...]]], num_ids: int) -> NDArray[np.float64]:
    """Return float64 [N, P, values]: a numeric table's rows by the `num_ids` ids that begin them, `keys` [N][P]."""
    table = _read_numbers(path, columns=5)
    row_numbers = {tuple(map(int, row[:num_ids])): number for number, row in enumerate(table)}
    missing = [str(row[0][0]) for row in keys if any(key not in row_numbers for key in row)]
    if missing:
        ids = pluralize(len(missing), "image id", "image ids")
        raise UsageError(f"{path}: it lacks lines of {ids}: {shorten_list(missing)}; {_PARTS_ADVICE}")
    order = np.array([[row_numbers[key] for key in row] for row in keys], dtype=np.int64)
    return table[order][..., num_ids:]


def _read_numbers(path: Path, columns: int) -> NDArray[np.float64]:
    lines = [line for line in read_text(path, _PARTS_ADVICE).splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{path}: the table is empty; {_PARTS_ADVICE}")
    try:
        table = np.loadtxt(lines, dtype=np.float64, ndmin=2, comments=None)
    except ValueError as error:
        raise UsageError(
            f"{path}: not CUB's table of numbers ({' '.join(str(error).split())}); {_PARTS_ADVICE}"
        ) from None
    if table.shape[1] != columns:
        width = pluralize(table.shape[1], "column", "columns")
        raise UsageError(f"{path}: {width} found, CUB's table has {columns}; {_PARTS_ADVICE}")
    finite = np.isfinite(table)
    if not finite.all():
        line = lines[int(finite.all(axis=1).argmin())]
        raise UsageError(f"{path}: {line.strip()[:80]!r} is not all finite numbers, CUB's table is; {_PARTS_ADVICE}")
    return table


def _read_part_names(path: Path) -> dict[int, str]:
    names = {int(key): name for key, name in _read_id_names(path)}
    if not names:
        raise UsageError(f"{path}: it names no part, CUB's has lines such as '7 left eye'; {_PARTS_ADVICE}")
    return names


def _read_id_names(path: Path) -> list[tuple[str, str]]:
    pairs = []
    for line in filter(str.strip, read_text(path, _PARTS_ADVICE).splitlines()):
        key, *rest = line.split(maxsplit=1)
        if not is_decimal(key) or not rest:
            raise UsageError(
                f"{path}: {line.strip()[:80]!r} is not CUB's format, a numeric id and a name; {_PARTS_ADVICE}"
            )
        pairs.append((key, rest[0].strip()))
    return pairs
