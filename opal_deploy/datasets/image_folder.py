"""Data sets of a user's own: one folder per class, or a list of images with labels.

    DATA/<class>/**/*.jpg                 or
    DATA/train/<class>/**/*.jpg           with or without DATA/val and DATA/test; also training, valid, validation and
                                          testing, in any case
    DATA/labels.csv                       columns image (or filename), label and, optionally, split

Classes are sorted by name. Hidden files and folders and outputs of `infer` are skipped, linked class folders are
followed, and images outside the class folders get a warning.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from pathlib import Path

from opal_deploy.datasets.samples import (
    IMAGE_SUFFIXES,
    DataSet,
    Sample,
    build_dataset,
    display_path,
    is_hidden,
    is_skipped,
    list_images,
    read_csv,
    read_text,
    shorten_list,
)
from opal_deploy.errors import UsageError

_SPLITS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
FOLDER_ADVICE = (
    "expected DATA/<class>/*.jpg or DATA/train/<class>/*.jpg, with images in each folder; for another data set, give "
    "--dataset"
)
LIST, _COLUMNS = "labels.csv", (("image", "label", "split"), ("image", "label"))
LIST_ADVICE = "expected columns image, label and, optionally, split (train, val or test)"


def read_image_folder(root: Path) -> DataSet:
    """List the images; `val` is empty where the data set has no such folder."""
    splits = _find_splits(root) or {"train": root}
    images = {split: _list_classes(folder) for split, folder in splits.items()}
    class_names = sorted(images["train"])
    samples = {
        split: [Sample(path, label) for label, name in enumerate(class_names) for path in by_class.get(name, ())]
        for split, by_class in images.items()
    }
    data = build_dataset("imagefolder", root, class_names, samples)
    for split, folder in splits.items():
        if class_names and not samples[split]:
            data.problems.append(f"no images in {folder.name}/")
        if unknown := sorted(images[split].keys() - images["train"].keys()):
            names = shorten_list(unknown)
            data.problems.append(f"classes in {folder.name}/ that {splits['train'].name}/ lacks: {names}")
    inside = [path for folder in {root, *splits.values()} for path in folder.iterdir() if not is_hidden(path.name)]
    if stray := sorted(path for path in inside if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()):
        names = shorten_list([display_path(path, root) for path in stray])
        data.warnings.append(f"skipped, outside the class folders: {names}")
    return data


def _list_classes(split: Path) -> dict[str, list[Path]]:
    """Return a split's images by class name, composed (NFC): systems store "ö" as one character or as two."""
    images: dict[str, list[Path]] = defaultdict(list)
    for folder in subfolders(split):
        images[unicodedata.normalize("NFC", folder.name)] += list_images(folder)
    return images


def _find_splits(root: Path) -> dict[str, Path]:
    """Return the folders of the splits; a folder that holds images itself is a class of that name."""
    splits: dict[str, Path] = {}
    for folder in subfolders(root):
        split = _SPLITS.get(folder.name.lower())
        if split is None or not subfolders(folder):
            continue
        if split in splits:
            raise UsageError(f"{root}: {splits[split].name}/ and {folder.name}/ both look like {split}; keep one")
        splits[split] = folder
    if splits and "train" not in splits:
        names = shorten_list([f"{folder.name}/" for folder in splits.values()])
        raise UsageError(f"{root}: found {names} but no train/; add it, or give a folder whose subfolders are classes")
    return splits


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder that may hold images, sorted by name."""
    folders = (p for p in folder.iterdir() if p.is_dir() and not is_skipped(p))
    return sorted(folders, key=lambda p: p.name)


def read_image_list(folder: Path) -> DataSet:
    """Read the list; images without a split are for training."""
    path = folder / LIST
    rows: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for number, _, values in read_csv(str(path), read_text(path, LIST_ADVICE), *_COLUMNS):
        image, label, *splits = ((value or "").strip() for value in values)
        split = _SPLITS.get("".join(splits).lower() or "train")
        if not (image and label and split):
            raise UsageError(f"{path}, line {number}: no image, no label or no known split; {LIST_ADVICE}")
        rows[split].append((folder / image, label))
    names = sorted({label for listed in rows.values() for _, label in listed})
    labels = {name: label for label, name in enumerate(names)}
    samples = {split: [Sample(image, labels[label]) for image, label in listed] for split, listed in rows.items()}
    return build_dataset("csv", folder, names, samples)


def has_image_list(folder: Path) -> bool:
    """Return whether `labels.csv` has the columns of a data set; it may be a table of something else."""
    text = read_text(folder / LIST, LIST_ADVICE)
    try:
        return next(read_csv(LIST, text, *_COLUMNS), None) is not None
    except UsageError:
        return False
