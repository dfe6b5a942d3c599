"""A course's subset of CUB-200-2011: 100 classes, images resized to 227x227, comma-separated tables, ids from 0.

    images.txt              <image id>, <path under images/>
    image_class_labels.txt  <image id>, <class id>
    train_test_split.txt    <image id>, <1 for TEST, 0 for training>
    classes.txt             <class id>, <name>

Its README calls the flag "is training", but counts 2,999 training images, as many as there are zeros. Whole images:
there are no boxes. The subset's own split, which has no validation images.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from opal_deploy.datasets.cub import has_cub_tables, is_comma_separated
from opal_deploy.datasets.listing import (
    Adapter,
    LabeledPath,
    Listing,
    build_listing,
    find_duplicate_names,
    find_escaping_paths,
    find_id_mismatches,
    is_decimal,
    is_path_inside,
    missing_files,
    read_all,
    read_text,
    require_files,
)
from opal_deploy.datasets.samples import shorten_list
from opal_deploy.errors import UsageError

_IMAGES, _LABELS, _SPLIT, _CLASSES = "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"
_TABLES = (_IMAGES, _LABELS, _SPLIT, _CLASSES)


def _is_cub100(folder: Path) -> bool:
    return has_cub_tables(folder) and is_comma_separated(folder)


def _read_cub100(folder: Path) -> Listing:
    """Read the tables; ids that do not agree become problems.

    Raises:
        UsageError: tables are missing or in another format.
    """
    require_files(folder, "the 100-class subset of CUB", missing_files(folder, _TABLES))
    tables = read_all({name: partial(_read_table, folder / name) for name in _TABLES})
    images, class_ids, flags, classes = (tables[name] for name in _TABLES)
    problems = find_escaping_paths(images.values(), _IMAGES, "images")
    problems += find_duplicate_names(list(classes.values()), _CLASSES)
    for name, table in ((_LABELS, class_ids), (_SPLIT, flags)):
        extra = sorted(table.keys() - images.keys(), key=int)
        missing = sorted(images.keys() - table.keys(), key=int)
        problems += find_id_mismatches(name, _IMAGES, extra, missing)
    if unknown := sorted(set(class_ids.values()) - classes.keys()):
        problems.append(f"class ids that {_CLASSES} does not name: {shorten_list(unknown)}")
    if unknown := sorted(set(flags.values()) - {"0", "1"}):
        problems.append(f"{_SPLIT} holds {shorten_list(unknown)} beside 0 and 1")
    labels = {class_id: label for label, class_id in enumerate(sorted(classes, key=int))}
    splits: dict[str, list[LabeledPath]] = {"train": [], "test": []}
    for image_id, name in images.items():
        label = labels.get(class_ids.get(image_id, ""))
        split = {"0": "train", "1": "test"}.get(flags.get(image_id, ""))
        if label is not None and split is not None and is_path_inside(name):
            splits[split].append((folder / "images" / name, label))
    class_names = [classes[class_id] for class_id in labels]
    return build_listing("cub100", folder, class_names, splits, problems=problems, image_folders=(folder / "images",))


def _read_table(path: Path) -> dict[str, str]:
    """Return id to value, in the file's order."""
    rows: dict[str, str] = {}
    for number, line in enumerate(read_text(path, "get the file again").splitlines(), 1):
        key, comma, value = (part.strip() for part in line.partition(","))
        if not line.strip():
            continue
        if not is_decimal(key) or not comma or not value or key in rows:
            raise UsageError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not a new numeric id, a comma and a value; "
                "get the file again"
            )
        rows[key] = value
    return rows


CUB100 = Adapter(
    "cub100",
    "the 100-class subset of CUB-200-2011 at 227x227",
    _is_cub100,
    lambda folder, partition: _read_cub100(folder),
    ("cub100_227px",),
)
