"""A course's subset of CUB-200-2011: 100 classes, pictures squashed to 227x227, comma-separated tables, ids from 0.

    images.txt              <image id>, <path under images/>
    image_class_labels.txt  <image id>, <class id>
    train_test_split.txt    <image id>, <1 for TEST, 0 for training>
    classes.txt             <class id>, <name>

Its README calls the flag "is training", but counts 2,999 training pictures, as many as there are zeros. Whole pictures:
there are no boxes. The set's own split; it has no validation pictures.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from opal_deploy.datasets.cub import comma_separated, has_tables
from opal_deploy.datasets.listing import (
    Adapter,
    Listing,
    Pair,
    all_of,
    from_pairs,
    ids_apart,
    is_id,
    lacking,
    leaving,
    of_one_name,
    require_files,
    stays_below,
    text_of,
)
from opal_deploy.datasets.samples import listed
from opal_deploy.errors import UsageError

_IMAGES, _LABELS, _SPLIT, _CLASSES = "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"
_TABLES = (_IMAGES, _LABELS, _SPLIT, _CLASSES)


def read(folder: Path) -> Listing:
    """The tables' content; ids that do not agree become problems.

    Raises:
        UsageError: tables that are absent or in another format.
    """
    require_files(folder, "the 100-class subset of CUB", lacking(folder, _TABLES))
    tables = all_of({name: partial(_table, folder / name) for name in _TABLES})
    images, labels, flags, classes = (tables[name] for name in _TABLES)
    problems = leaving(images.values(), _IMAGES, "images") + of_one_name(list(classes.values()), _CLASSES)
    for name, table in ((_LABELS, labels), (_SPLIT, flags)):
        strange = sorted(table.keys() - images.keys(), key=int)
        absent = sorted(images.keys() - table.keys(), key=int)
        problems += ids_apart(name, _IMAGES, strange, absent)
    if strange := sorted(set(labels.values()) - classes.keys()):
        problems.append(f"class ids that {_CLASSES} does not name: {listed(strange)}")
    if strange := sorted(set(flags.values()) - {"0", "1"}):
        problems.append(f"{_SPLIT} holds {listed(strange)} beside 0 and 1")
    label_of = {class_id: label for label, class_id in enumerate(sorted(classes, key=int))}
    splits: dict[str, list[Pair]] = {"train": [], "test": []}
    for key, name in images.items():
        label, split = label_of.get(labels.get(key, "")), {"0": "train", "1": "test"}.get(flags.get(key, ""))
        if label is not None and split is not None and stays_below(name):
            splits[split].append((folder / "images" / name, label))
    class_names = [classes[class_id] for class_id in label_of]
    return from_pairs("cub100", folder, class_names, splits, problems=problems, pictures=(folder / "images",))


def _table(path: Path) -> dict[str, str]:
    """Id to value, in the file's order."""
    rows: dict[str, str] = {}
    for number, line in enumerate(text_of(path, "get the file again").splitlines(), 1):
        key, comma, value = (part.strip() for part in line.partition(","))
        if not line.strip():
            continue
        if not is_id(key) or not comma or not value or key in rows:
            raise UsageError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not a new numeric id, a comma and a value; "
                "get the file again"
            )
        rows[key] = value
    return rows


ADAPTER = Adapter(
    "cub100",
    "the 100-class subset of CUB-200-2011 at 227x227",
    lambda folder: has_tables(folder) and comma_separated(folder),
    lambda folder, _: read(folder),
    ("cub100_227px",),
)
