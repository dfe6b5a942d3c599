"""ImageNet-1K (ILSVRC2012): the official validation pictures are the TEST split, as in the paper.

    train/<wnid>/*.JPEG
    val/<wnid>/*.JPEG                       or, as downloaded, val/ILSVRC2012_val_<8 digits>.JPEG with one of
      ILSVRC2012_devkit_t12/data/           meta.mat, ILSVRC2012_validation_ground_truth.txt
      LOC_val_solution.csv                  Kaggle's

Kaggle's own tree (ILSVRC/Data/CLS-LOC beside the LOC_ files) is read as it is. Validation is set aside from train/.

Classes are sorted by wnid, the order in which every published ImageNet network counts them (not the devkit's ids). A
class is called by its wnid; where a devkit or LOC_synset_mapping.txt names it, by the wnid and the first of its names
("n01440764 tench"), which both sources spell alike. A name therefore depends on that file being there: keep it where a
model is evaluated, too. The name alone would not do, two classes are called "crane".
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from opal_deploy.datasets.image_folder import Search, subfolders
from opal_deploy.datasets.listing import (
    Adapter,
    Listing,
    Pair,
    from_pairs,
    has,
    is_id,
    lacking,
    leaving,
    require_files,
    text_of,
)
from opal_deploy.datasets.samples import counted, listed
from opal_deploy.datasets.torchvision_lists import load_matlab
from opal_deploy.errors import UsageError

_TITLE = "ImageNet-1K"
_WNID = re.compile(r"n\d{8}")
_TREE = "ILSVRC/Data/CLS-LOC"
_META = "ILSVRC2012_devkit_t12/data/meta.mat"
_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_KAGGLE_TRUTH = "LOC_val_solution.csv"
_KAGGLE_NAMES = "LOC_synset_mapping.txt"


def is_imagenet(folder: Path) -> bool:
    """Whether it has train/ or val/ beside a devkit or Kaggle's files, or both, train/ with all of the thousand wnids.

    Other sets keep wnids as folders and have a val/ that is for validation (Imagenette, say): those are ImageFolders.
    """
    inner, beside = _places(folder)
    there = [has(inner, name) for name in ("train/", "val/")]
    # one of them is an archive half unpacked, of which `read` says what is absent
    if any(there) and any(has(beside, name) for name in (_META, _TRUTH, _KAGGLE_TRUTH, _KAGGLE_NAMES)):
        return True
    if not all(there):
        return False
    wnids = [found.name for found in subfolders(inner / "train") if _WNID.fullmatch(found.name)]
    return len(wnids) == 1000


def read(folder: Path) -> Listing:
    """The folders' content.

    Raises:
        UsageError: folders that are absent, or validation pictures that nothing gives labels to.
    """
    inner, beside = _places(folder)
    require_files(folder, _TITLE, lacking(inner, ("train/", "val/")))
    wnids: list[str] = []
    others: list[str] = []
    for found in subfolders(inner / "train"):
        (wnids if _WNID.fullmatch(found.name) else others).append(found.name)
    if len(wnids) < 2:
        raise UsageError(
            f"{folder}: {counted(len(wnids), 'folder in train/ is', 'folders in train/ are')} called like n01440764, "
            "at least 2 are needed; unpack ILSVRC2012_img_train.tar and the archives in it, each into a folder of its "
            "name"
        )
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    search = Search(folder)
    search.stray(inner / "train")
    train = [(path, label) for wnid, label in label_of.items() for path in search.pictures(inner / "train" / wnid)]
    named = _val(inner / "val", beside, search)
    problems = search.problems()
    warnings = [f"folders of train/ that are no wnid were passed over: {listed(others)}"] if others else []
    warnings += search.warnings()
    if strange := sorted({wnid for _, wnid in named} - label_of.keys()):
        problems.append(f"classes of val/ that train/ does not have: {listed(strange)}")
    test: list[Pair] = [(path, label_of[wnid]) for path, wnid in named if wnid in label_of]
    if not test:
        problems.append("no pictures in val/")
    return from_pairs(
        "imagenet",
        folder,
        _class_names(wnids, beside),
        {"train": train, "test": test},
        problems=problems,
        warnings=warnings,
        pictures=(inner / "val",),
    )


def _places(folder: Path) -> tuple[Path, Path]:
    """Where train/ and val/ lie, and where the files about them lie."""
    inner = folder / _TREE if (folder / _TREE).is_dir() else folder
    absolute = inner.absolute()
    if not has(inner, _KAGGLE_TRUTH) and absolute.as_posix().endswith(f"/{_TREE}"):
        return inner, absolute.parents[2]
    return inner, folder


def _val(folder: Path, beside: Path, search: Search) -> list[tuple[Path, str]]:
    """The official validation pictures with their wnids."""
    classes = [found for found in subfolders(folder) if _WNID.fullmatch(found.name)]
    if classes:
        return [(path, found.name) for found in classes for path in search.pictures(found)]
    if has(beside, _META, _TRUTH):
        wnid_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in _synsets(beside / _META)}
        ids = [int(line) if is_id(line) else 0 for line in _text(beside / _TRUTH).split()]
        if strange := sorted(set(ids) - wnid_of.keys()):
            raise UsageError(
                f"{beside / _TRUTH}: ids that meta.mat lacks: {listed([*map(str, strange)])}; unpack it again"
            )
        return [(folder / f"ILSVRC2012_val_{i:08}.JPEG", wnid_of[class_id]) for i, class_id in enumerate(ids, 1)]
    if has(beside, _KAGGLE_TRUTH):
        return [(folder / f"{name}.JPEG", wnid) for name, wnid in _kaggle_truth(beside / _KAGGLE_TRUTH)]
    found = counted(len(search.pictures(folder)), "picture", "pictures")
    raise UsageError(
        f"{folder}: {found} without class folders, and nothing gives their labels; put "
        f"ILSVRC2012_devkit_t12/ or {_KAGGLE_TRUTH} into {beside}, or sort the pictures into val/<wnid>/"
    )


def _synsets(path: Path) -> list[dict[str, Any]]:
    """The thousand leaves of the devkit's table; the inner nodes of WordNet above them are no classes."""
    try:
        table = load_matlab(path)["synsets"]
        rows = [{name: row[name] for name in ("ILSVRC2012_ID", "WNID", "words", "num_children")} for row in table]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not the devkit's table of synsets ({error}); unpack the devkit again") from None
    return [row for row in rows if row["num_children"] == 0]


def _kaggle_truth(path: Path) -> list[tuple[str, str]]:
    """Picture and wnid: ILSVRC2012_val_00048981,n03995372 85 1 499 272 (a wnid and a box, for each object)."""
    found = []
    try:
        rows = list(csv.DictReader(_text(path).splitlines()))
    except csv.Error as error:
        raise UsageError(f"{path}: not a table of comma-separated values ({error}); get the file again") from None
    for row in rows:
        name, objects = row.get("ImageId"), (row.get("PredictionString") or "").split()
        if not name or not objects:
            raise UsageError(f"{path}: a line without ImageId or PredictionString; get the file again")
        found.append((name, objects[0]))
    if problems := leaving((name for name, _ in found), path.name, "val"):
        raise UsageError(f"{path}: {problems[0]}; get the file again")
    return sorted(found)


def _text(path: Path) -> str:
    # what is no UTF-8 becomes what is no id and no wnid, and is reported as such
    return text_of(path, "get the file again", errors="replace")


def _class_names(wnids: list[str], beside: Path) -> list[str]:
    names: dict[str, str] = {}
    if has(beside, _META):
        names = {str(row["WNID"]): str(row["words"]) for row in _synsets(beside / _META)}
    elif has(beside, _KAGGLE_NAMES):
        lines = _text(beside / _KAGGLE_NAMES).splitlines()
        names = {wnid: words for wnid, _, words in (line.strip().partition(" ") for line in lines)}
    return [f"{wnid} {names[wnid].split(',')[0].strip()}" if wnid in names else wnid for wnid in wnids]


ADAPTER = Adapter(
    "imagenet",
    _TITLE,
    is_imagenet,
    lambda folder, _: read(folder),
    ("imagenet", "ImageNet", "ILSVRC2012", "imagenet-object-localization-challenge"),
)
