"""CUB-200-2011's own folder: five tables, 1-based ids, `images/`.

    images.txt              <image id> <path under images/>
    image_class_labels.txt  <image id> <class id>
    train_test_split.txt    <image id> <1 for training, 0 for test>
    bounding_boxes.txt      <image id> <x> <y> <width> <height>, pixels
    classes.txt             <class id> <name>

Pictures are cropped to their boxes, in training and in test, as in the paper. The official split; CUB has no validation
pictures.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

from opal_deploy.datasets.listing import (
    Adapter,
    Listing,
    all_of,
    has,
    ids_apart,
    is_id,
    lacking,
    leaving,
    of_one_name,
    require_files,
    stays_below,
    text_of,
)
from opal_deploy.datasets.samples import DataSet, Sample, counted, listed
from opal_deploy.errors import UsageError

# name, values a line after the id
_TABLES = {
    "images.txt": 1,
    "image_class_labels.txt": 1,
    "train_test_split.txt": 1,
    "bounding_boxes.txt": 4,
    "classes.txt": 1,
}


_ADVICE = "unpack the official archive again, or mend its tables"

# an image's id with a comma after it: see `cub100`
_COMMA = re.compile(r"\s*\d+\s*,")


def is_cub(folder: Path) -> bool:
    """Whether the folder has tables of CUB's names, with CUB's spaces. No ImageFolder has."""
    return has_tables(folder) and not comma_separated(folder)


def has_tables(folder: Path) -> bool:
    """Whether the folder has the tables that CUB and its relatives share."""
    return has(folder, "images.txt", "image_class_labels.txt")


def comma_separated(folder: Path) -> bool:
    """Whether images.txt has commas after its ids."""
    with (folder / "images.txt").open(encoding="utf-8-sig", errors="replace") as file:
        return _COMMA.match(file.readline()) is not None


def read(folder: Path) -> Listing:
    """The tables' content; an image that some table lacks becomes a problem.

    Raises:
        UsageError: tables that are absent or not CUB's.
    """
    require_files(
        folder,
        "CUB-200-2011",
        lacking(folder, _TABLES),
        "unpack the official archive again, or give the pictures as DATA/train/<class> and DATA/test/<class>",
    )
    tables = all_of({name: partial(_table, folder / name, values) for name, values in _TABLES.items()})
    label_of = {class_id: label for label, class_id in enumerate(tables["classes.txt"])}
    splits: dict[str, list[Sample]] = {"0": [], "1": []}
    for key, (name,) in tables["images.txt"].items():
        others = (tables[table].get(key) for table in ("image_class_labels.txt", "train_test_split.txt"))
        class_id, flag = (values[0] if values else "" for values in others)
        box = tables["bounding_boxes.txt"].get(key)
        if box is None or class_id not in label_of or flag not in splits or not stays_below(name):
            continue  # one of `_disagreements`
        x, y, width, height = (float(value) for value in box)
        splits[flag].append(Sample(folder / "images" / name, label_of[class_id], (x, y, x + width, y + height)))
    class_names = [values[0] for values in tables["classes.txt"].values()]
    return Listing(
        DataSet(folder, "cub", class_names, splits["1"], [], splits["0"], crop="boxes"),
        _disagreements(tables),
        (folder / "images",),
        _ADVICE,
    )


def _table(path: Path, values: int) -> dict[str, list[str]]:
    """Id to values, in the file's order; a single value may hold spaces."""
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(text_of(path, _ADVICE).splitlines(), 1):
        if not line.strip():
            continue
        key, *rest = line.split(maxsplit=1) if values == 1 else line.split()
        rest = [value.strip() for value in rest]
        # ids that are no plain numbers are another file format, such as comma-separated relatives of CUB
        if not is_id(key) or len(rest) != values or key in rows or not _numbers(rest, needed=values == 4):
            raise UsageError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not CUB's format, a new numeric id and "
                f"{counted(values, 'value', 'values')} separated by spaces; {_ADVICE}"
            )
        rows[key] = rest
    if not rows:
        raise UsageError(f"{path}: the table is empty; {_ADVICE}")
    return rows


def _numbers(values: list[str], *, needed: bool) -> bool:
    if not needed:
        return True
    try:
        return all(math.isfinite(float(value)) for value in values)
    except ValueError:
        return False


def _disagreements(tables: dict[str, dict[str, list[str]]]) -> list[str]:
    images, classes = tables["images.txt"], tables["classes.txt"]
    problems = leaving((name for (name,) in images.values()), "images.txt", "images")
    problems += of_one_name([name for (name,) in classes.values()], "classes.txt")
    for name in ("image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt"):
        table = tables[name]
        strange = [key for key in table if key not in images]
        absent = [key for key in images if key not in table]
        problems += ids_apart(name, "images.txt", strange, absent)
    flags = sorted({values[0] for values in tables["train_test_split.txt"].values()} - {"0", "1"})
    if flags:
        problems.append(f"train_test_split.txt holds {listed(flags)} beside 0 and 1")
    unknown = sorted({values[0] for values in tables["image_class_labels.txt"].values()} - classes.keys())
    if unknown:
        problems.append(f"class ids that classes.txt does not name: {listed(unknown)}")
    return problems


ADAPTER = Adapter("cub", "CUB-200-2011", is_cub, lambda folder, _: read(folder), ("CUB_200_2011",))
