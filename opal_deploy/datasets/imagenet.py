"""ImageNet-1K (ILSVRC2012): the official validation images are the TEST split, as in the paper.

    train/<wnid>/*.JPEG
    val/<wnid>/*.JPEG                       or, as downloaded, val/ILSVRC2012_val_<8 digits>.JPEG with one of
      ILSVRC2012_devkit_t12/data/           meta.mat, ILSVRC2012_validation_ground_truth.txt
      LOC_val_solution.csv                  Kaggle's

Kaggle's own tree (ILSVRC/Data/CLS-LOC next to the LOC_ files) is read as it is. Validation is set aside from train/.

Classes are sorted by wnid, the order of every published ImageNet network (not the devkit's ids). A class is named by
its wnid. With a devkit or LOC_synset_mapping.txt, its first name follows ("n01440764 tench"), spelled alike in both.
The name alone is ambiguous: two classes are called "crane". Class names therefore depend on that file, so keep it for
evaluation too.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from opal_deploy.datasets.image_folder import ImageSearch, subfolders
from opal_deploy.datasets.listing import (
    Adapter,
    LabeledPath,
    Listing,
    build_listing,
    find_escaping_paths,
    has_files,
    is_decimal,
    missing_files,
    read_matlab,
    read_text,
    require_files,
)
from opal_deploy.datasets.samples import pluralize, shorten_list
from opal_deploy.errors import UsageError

_TITLE = "ImageNet-1K"
_WNID = re.compile(r"n\d{8}")
_KAGGLE_TREE = "ILSVRC/Data/CLS-LOC"
_META = "ILSVRC2012_devkit_t12/data/meta.mat"
_LABELS = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_KAGGLE_LABELS = "LOC_val_solution.csv"
_KAGGLE_NAMES = "LOC_synset_mapping.txt"


def _is_imagenet(folder: Path) -> bool:
    """Return whether train/ or val/ lie next to a devkit or Kaggle's files, or train/ has all of the thousand wnids.

    Data sets such as Imagenette have folders named by wnid and a val/ for validation: those are ImageFolders.
    """
    images, lists = _find_folders(folder)
    exists = [has_files(images, name) for name in ("train/", "val/")]
    # only one of them is an archive half unpacked; _read_imagenet reports what is missing
    if any(exists) and any(has_files(lists, name) for name in (_META, _LABELS, _KAGGLE_LABELS, _KAGGLE_NAMES)):
        return True
    return all(exists) and sum(_WNID.fullmatch(f.name) is not None for f in subfolders(images / "train")) == 1000


def _read_imagenet(folder: Path) -> Listing:
    """Read the folders and the labels of the validation images.

    Raises:
        UsageError: folders are missing, or the labels of the validation images.
    """
    images, lists = _find_folders(folder)
    require_files(folder, _TITLE, missing_files(images, ("train/", "val/")))
    wnids: list[str] = []
    others: list[str] = []
    for subfolder in subfolders(images / "train"):
        (wnids if _WNID.fullmatch(subfolder.name) else others).append(subfolder.name)
    if len(wnids) < 2:
        raise UsageError(
            f"{folder}: {pluralize(len(wnids), 'folder', 'folders')} in train/ with a name like n01440764, at least 2 "
            "are needed; unpack ILSVRC2012_img_train.tar and the archives in it, each into a folder of its name"
        )
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    search = ImageSearch(folder)
    search.note_stray_files(images / "train")
    train = [(path, label) for wnid, label in labels.items() for path in search.find_images(images / "train" / wnid)]
    validation = _read_validation(images / "val", lists, search)
    problems = search.problems()
    warnings = [f"skipped folders of train/ that are not wnids: {shorten_list(others)}"] if others else []
    warnings += search.warnings()
    if unknown := sorted({wnid for _, wnid in validation} - labels.keys()):
        problems.append(f"classes of val/ that train/ does not have: {shorten_list(unknown)}")
    test: list[LabeledPath] = [(path, labels[wnid]) for path, wnid in validation if wnid in labels]
    if not test:
        problems.append("no images in val/")
    return build_listing(
        "imagenet", folder, _class_names(wnids, lists), {"train": train, "test": test},
        problems=problems, warnings=warnings, image_folders=(images / "val",),
    )  # fmt: skip


def _find_folders(folder: Path) -> tuple[Path, Path]:
    """Return the folder of train/ and val/, and the folder of their lists."""
    images = folder / _KAGGLE_TREE if (folder / _KAGGLE_TREE).is_dir() else folder
    absolute = images.absolute()
    if not has_files(images, _KAGGLE_LABELS) and absolute.as_posix().endswith(f"/{_KAGGLE_TREE}"):
        return images, absolute.parents[2]
    return images, folder


def _read_validation(folder: Path, lists: Path, search: ImageSearch) -> list[tuple[Path, str]]:
    """Return the official validation images with their wnids."""
    classes = [subfolder for subfolder in subfolders(folder) if _WNID.fullmatch(subfolder.name)]
    if classes:
        return [(path, subfolder.name) for subfolder in classes for path in search.find_images(subfolder)]
    if has_files(lists, _META, _LABELS):
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in _read_synsets(lists / _META)}
        ids = [int(line) if is_decimal(line) else 0 for line in _read_lenient_text(lists / _LABELS).split()]
        if unknown := sorted(set(ids) - wnids.keys()):
            raise UsageError(
                f"{lists / _LABELS}: ids that meta.mat lacks: {shorten_list([*map(str, unknown)])}; unpack it again"
            )
        return [(folder / f"ILSVRC2012_val_{i:08}.JPEG", wnids[class_id]) for i, class_id in enumerate(ids, 1)]
    if has_files(lists, _KAGGLE_LABELS):
        return [(folder / f"{name}.JPEG", wnid) for name, wnid in _read_kaggle_labels(lists / _KAGGLE_LABELS)]
    images = pluralize(len(search.find_images(folder)), "image", "images")
    raise UsageError(
        f"{folder}: no labels for {images} without class folders; put ILSVRC2012_devkit_t12/ or {_KAGGLE_LABELS} into "
        f"{lists}, or sort the images into val/<wnid>/"
    )


def _read_synsets(path: Path) -> list[dict[str, Any]]:
    """Return the thousand leaves of the devkit's table; WordNet's inner nodes are not classes."""
    try:
        table = read_matlab(path)["synsets"]
        rows = [{name: row[name] for name in ("ILSVRC2012_ID", "WNID", "words", "num_children")} for row in table]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not the devkit's table of synsets ({error}); unpack the devkit again") from None
    return [row for row in rows if row["num_children"] == 0]


def _read_kaggle_labels(path: Path) -> list[tuple[str, str]]:
    """Return image names and wnids; a line is `ILSVRC2012_val_00048981,n03995372 85 1 499 272`, wnids with boxes."""
    labels = []
    try:
        rows = list(csv.DictReader(_read_lenient_text(path).splitlines()))
    except csv.Error as error:
        raise UsageError(f"{path}: not a table of comma-separated values ({error}); get the file again") from None
    for row in rows:
        name, objects = row.get("ImageId"), (row.get("PredictionString") or "").split()
        if not name or not objects:
            raise UsageError(f"{path}: a line without ImageId or PredictionString; get the file again")
        labels.append((name, objects[0]))
    if problems := find_escaping_paths((name for name, _ in labels), path.name, "val"):
        raise UsageError(f"{path}: {problems[0]}; get the file again")
    return sorted(labels)


def _read_lenient_text(path: Path) -> str:
    # bytes that are not UTF-8 become text that is neither an id nor a wnid, and is reported as such
    return read_text(path, "get the file again", errors="replace")


def _class_names(wnids: list[str], lists: Path) -> list[str]:
    names: dict[str, str] = {}
    if has_files(lists, _META):
        names = {str(row["WNID"]): str(row["words"]) for row in _read_synsets(lists / _META)}
    elif has_files(lists, _KAGGLE_NAMES):
        lines = _read_lenient_text(lists / _KAGGLE_NAMES).splitlines()
        names = {wnid: words for wnid, _, words in (line.strip().partition(" ") for line in lines)}
    return [f"{wnid} {names[wnid].split(',')[0].strip()}" if wnid in names else wnid for wnid in wnids]


_FOLDERS = ("imagenet", "ImageNet", "ILSVRC2012", "imagenet-object-localization-challenge")
IMAGENET = Adapter("imagenet", _TITLE, _is_imagenet, _read_imagenet, _FOLDERS)
