"""CUB-200-2011's own folder: five tables, 1-based ids, `images/`.

    images.txt              <image id> <path under images/>
    image_class_labels.txt  <image id> <class id>
    train_test_split.txt    <image id> <1 for training, 0 for test>
    bounding_boxes.txt      <image id> <x> <y> <width> <height>, pixels
    classes.txt             <class id> <name>

Pictures are cropped to their boxes, in training and in test, as in the paper.
"""

from __future__ import annotations

from pathlib import Path

from opal_deploy.errors import UsageError
from opal_deploy.train.data.samples import DataSet, Sample, classes_without, listed

# name, values a line after the id
_TABLES = {
    "images.txt": 1,
    "image_class_labels.txt": 1,
    "train_test_split.txt": 1,
    "bounding_boxes.txt": 4,
    "classes.txt": 1,
}


def is_cub(root: Path) -> bool:
    """Whether the folder has tables of CUB's names. No ImageFolder has."""
    return (root / "images.txt").is_file() and (root / "image_class_labels.txt").is_file()


def read(root: Path) -> DataSet:
    """The official split; `val` is empty, CUB has none.

    Raises:
        UsageError: everything wrong with the tables and every missing picture, in one line.
    """
    absent = [name for name in _TABLES if not (root / name).is_file()]
    if absent:
        raise UsageError(
            f"{root}: it looks like CUB-200-2011 but lacks {', '.join(absent)}; "
            "unpack the official archive again, or give the pictures as DATA/train/<class> and DATA/test/<class>"
        )
    tables = {name: _table(root / name, values) for name, values in _TABLES.items()}
    images = {key: values[0] for key, values in tables["images.txt"].items()}
    problems = _disagreements(tables)
    folder = root / "images"
    missing = sorted(name for name in images.values() if not (folder / name).is_file())
    if missing:
        problems.append(f"{len(missing):,} pictures of images.txt are not in images/: {listed(missing)}")
    if problems:
        raise UsageError(f"{root}: {'; '.join(problems)}; unpack the official archive again, or mend its tables")
    class_ids = list(tables["classes.txt"])
    label_of = {class_id: label for label, class_id in enumerate(class_ids)}
    splits: dict[str, list[Sample]] = {"0": [], "1": []}
    for key, name in images.items():
        x, y, width, height = (float(value) for value in tables["bounding_boxes.txt"][key])
        label = label_of[tables["image_class_labels.txt"][key][0]]
        sample = Sample(folder / name, label, (x, y, x + width, y + height))
        splits[tables["train_test_split.txt"][key][0]].append(sample)
    class_names = [tables["classes.txt"][class_id][0] for class_id in class_ids]
    if unseen := classes_without(splits["1"], class_names):
        raise UsageError(
            f"{root}: classes without a training picture: {listed(unseen)}; take their lines out of classes.txt"
        )
    return DataSet(root, "cub", class_names, splits["1"], [], splits["0"], crop="boxes")


def _table(path: Path, values: int) -> dict[str, list[str]]:
    """Id to values, in the file's order; a single value may hold spaces."""
    rows: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a readable UTF-8 table ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        key, *rest = line.split(maxsplit=1) if values == 1 else line.split()
        rest = [value.strip() for value in rest]
        # ids that are no plain numbers are another file format, such as comma-separated relatives of CUB
        if not key.isdigit() or len(rest) != values or key in rows or not _numbers(rest, needed=values == 4):
            raise UsageError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not CUB's format, a new numeric id and "
                f"{values} value(s) separated by spaces"
            )
        rows[key] = rest
    if not rows:
        raise UsageError(f"{path}: the table is empty")
    return rows


def _numbers(values: list[str], *, needed: bool) -> bool:
    if not needed:
        return True
    try:
        [float(value) for value in values]
    except ValueError:
        return False
    return True


def _disagreements(tables: dict[str, dict[str, list[str]]]) -> list[str]:
    images, classes = tables["images.txt"], tables["classes.txt"]
    problems = []
    for name in ("image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt"):
        table = tables[name]
        without_image = [key for key in table if key not in images]
        without_line = [key for key in images if key not in table]
        if without_image:
            problems.append(f"{len(without_image):,} ids of {name} are not in images.txt: {listed(without_image)}")
        if without_line:
            problems.append(f"{len(without_line):,} ids of images.txt are not in {name}: {listed(without_line)}")
    flags = sorted({values[0] for values in tables["train_test_split.txt"].values()} - {"0", "1"})
    if flags:
        problems.append(f"train_test_split.txt holds {listed(flags)} beside 0 and 1")
    unknown = sorted({values[0] for values in tables["image_class_labels.txt"].values()} - classes.keys())
    if unknown:
        problems.append(f"class ids that classes.txt does not name: {listed(unknown)}")
    return problems
