"""The known data sets: how each is recognised and read, and the way from a folder to a checked data set.

Nothing is downloaded. Most published data sets are read by torchvision's own classes, with their class names; those of
ImageNet begin with the wnid, since two of its classes are called "crane". torchvision writes ImageNet's meta.bin next
to the devkit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from opal_deploy.datasets import cub, image_folder
from opal_deploy.datasets.checks import check_dataset, duplicate_warnings
from opal_deploy.datasets.samples import (
    SPLIT_FRACTION,
    SPLIT_SEED,
    DataSet,
    Sample,
    build_dataset,
    find_root,
    shorten_list,
    split_off_validation,
    stratified_split,
    unreadable_error,
)
from opal_deploy.errors import OpalError, UsageError, require
from opal_deploy.logs import Progress, no_progress
from opal_deploy.preprocess.geometry import Box

_ADVICE = "unpack the official archives again"


def _read_dogs(folder: Path) -> DataSet:
    """Read lists and boxes of Stanford Dogs; each image is cropped to its first dog's box."""
    splits = {split: _read_dogs_list(folder, f"{split}_list.mat") for split in ("train", "test")}
    breeds = sorted({(sample.label, sample.path.parent.name) for samples in splits.values() for sample in samples})
    if [label for label, _ in breeds] != list(range(len(breeds))):
        raise UsageError(f"{folder}: the lists' class ids and folders are not one to one; {_ADVICE}")
    return build_dataset("dogs", folder, [name for _, name in breeds], splits, crop="boxes")


def _read_dogs_list(folder: Path, name: str) -> list[Sample]:
    path = folder / "lists" / name if (folder / "lists" / name).is_file() else folder / name
    require("scipy", "train", f"reading {path}")
    from scipy.io import loadmat

    try:
        table = loadmat(path, squeeze_me=True)
        rows = zip(np.atleast_1d(table["file_list"]), np.atleast_1d(table["labels"]), strict=True)
        samples = [Sample(folder / "Images" / str(file), int(label) - 1) for file, label in rows]
    except Exception as error:  # SciPy's reader raises nearly anything for a damaged file
        text = " ".join(str(error).split())
        raise UsageError(f"{path}: not a Matlab file with file_list and as many labels ({text}); {_ADVICE}") from None
    # a missing image has no box; it is reported with all others
    return [replace(sample, box=_read_voc_box(folder, sample.path)) for sample in samples]


def _read_voc_box(folder: Path, image: Path) -> Box | None:
    """Return the first box in an image's annotation, PASCAL VOC's XML: (x0, y0, x1, y1) in pixels."""
    path = folder / "Annotation" / image.parent.name / image.stem
    try:
        root = ElementTree.parse(path).getroot()
        edges = [f"object/bndbox/{edge}" for edge in ("xmin", "ymin", "xmax", "ymax")]
        x0, y0, x1, y1 = (float(root.findtext(edge, f"no {edge}")) for edge in edges)
    # LookupError: an unknown encoding
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
        if image.is_file():
            raise UsageError(f"{path}: not a readable annotation ({error}); {_ADVICE}") from None
        return None
    return x0, y0, x1, y1


def _read_with_torchvision(
    name: str, class_name: str, own_name: str, splits: Mapping[str, str], folder: Path
) -> DataSet:
    """Read a data set with a class of torchvision.datasets.

    torchvision reads the folder `own_name` in a root; there a link of this name leads to the user's folder. `splits`
    maps our names of the splits to torchvision's; an empty name is for a class without splits, of whose images a fifth
    is set aside for testing.
    """
    for package in ("torchvision", "scipy"):
        require(package, "train", f"reading {folder}")
    import torchvision.datasets

    listed: dict[str, list[Sample]] = {}
    names: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="opal-deploy-") as root:
        link = Path(root, own_name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder.resolve())
        where = str(link if name == "imagenet" else root)
        for split, official in splits.items():
            try:
                options = {"split": official} if official else {}
                dataset = getattr(torchvision.datasets, class_name)(where, **options)
                names[split], samples = _list_samples(dataset, link)
            except Exception as error:  # torchvision and SciPy raise nearly anything for a damaged list
                text = " ".join(str(error).split()).split(" You can use download")[0]
                # the temporary folder is gone when somebody looks for it
                text = text.replace(str(link), str(folder)).rstrip(".")
                message = f"{folder}: torchvision cannot read its {official or 'lists'} ({text}); {_ADVICE}"
                raise UsageError(message) from None
            listed[split] = [Sample(folder / Path(path).relative_to(link), int(label)) for path, label in samples]
    # torchvision numbers the names that it meets: a class that one list lacks would rename all after it
    lacking = name == "pets" and {sample.label for sample in listed["train"]} != {*range(len(names["train"]))}
    if lacking or any(of_split != names["train"] for of_split in names.values()):
        raise UsageError(f"{folder}: its lists have different classes, or a class id without a class; {_ADVICE}")
    data = build_dataset(name, folder, names["train"], listed)
    if "test" in splits:
        return data
    train, test = stratified_split(data)
    warning = (
        f"no official split: the test split is a stratified {SPLIT_FRACTION:.0%} of each class (seed {SPLIT_SEED}); "
        "results cannot be compared with published ones"
    )
    return replace(data, train=train, test=test, warnings=[warning])


def _list_samples(dataset: Any, link: Path) -> tuple[list[str], Iterable[tuple[str | Path, int]]]:
    """Return names and samples, which torchvision's classes keep in different, mostly private, attributes."""
    if hasattr(dataset, "categories"):  # Caltech-101
        names, labels = dataset.categories, dataset.y
        files = [f"{names[label]}/image_{number:04}.jpg" for number, label in zip(dataset.index, labels, strict=True)]
        return names, [(link / "101_ObjectCategories" / file, y) for file, y in zip(files, labels, strict=True)]
    if hasattr(dataset, "wnids"):  # ImageNet
        names = [f"{wnid} {words[0]}" for wnid, words in zip(dataset.wnids, dataset.classes, strict=True)]
        return names, [(path, label) for path, label in dataset.imgs if not Path(path).name.startswith(".")]
    if hasattr(dataset, "_samples"):
        return dataset.classes, dataset._samples
    files = dataset._image_files if hasattr(dataset, "_image_files") else dataset._images
    return dataset.classes, zip(files, dataset._labels, strict=True)


@dataclass(frozen=True)
class _Layout:
    """How one data set is recognised and read."""

    read: Callable[[Path], DataSet]  # from the data set's folder to its lists
    files: tuple[str, ...]  # must be in the folder, see `_missing_files`; a folder that has them all is recognised
    advice: str = _ADVICE  # what to do about faults of the lists
    is_own: Callable[[Path], bool] = lambda folder: True  # whether a folder with all files is this data set


_ALL = {"train": "train", "val": "val", "test": "test"}
# torchvision's class, its folder, its splits by ours, and the files that tell
_TORCHVISION = {
    "cars": ("StanfordCars", "stanford_cars", {"train": "train", "test": "test"},
             ("devkit/", "cars_train/", "cars_test/", "cars_test_annos_withlabels.mat")),
    "pets": ("OxfordIIITPet", "oxford-iiit-pet", {"train": "trainval", "test": "test"},
             ("images/", "annotations/trainval.txt", "annotations/test.txt")),
    "flowers": ("Flowers102", "flowers-102", _ALL, ("jpg/", "setid.mat", "imagelabels.mat")),
    # the official validation images are for testing
    "imagenet": ("ImageNet", "imagenet", {"train": "train", "test": "val"},
                 ("train/", "val/", "meta.bin|ILSVRC2012_devkit_t12.tar.gz")),
    "caltech101": ("Caltech101", "caltech101", {"train": ""}, ("101_ObjectCategories/",)),
    # the first of ten official partitions; torchvision's root holds dtd/, which holds the archive's own dtd/
    "dtd": ("DTD", "dtd/dtd", _ALL, ("images/", "labels/train1.txt")),
    # has ten official partitions, which torchvision does not read
    "sun397": ("SUN397", "SUN397", {"train": ""}, ("ClassName.txt", "a/")),
}  # fmt: skip
_DOGS_FILES = ("Images/", "Annotation/", "train_list.mat|lists/train_list.mat", "test_list.mat|lists/test_list.mat")
_LAYOUTS = {
    "cub": _Layout(cub.read_cub, cub.FILES, cub.ADVICE),
    "dogs": _Layout(_read_dogs, _DOGS_FILES),
    **{
        name: _Layout(partial(_read_with_torchvision, name, class_name, own_name, splits), files)
        for name, (class_name, own_name, splits, files) in _TORCHVISION.items()
    },
    "csv": _Layout(
        image_folder.read_image_list, (image_folder.LIST,), image_folder.LIST_ADVICE, image_folder.has_image_list
    ),
    # for every folder that no other recognises
    "imagefolder": _Layout(image_folder.read_image_folder, (), image_folder.FOLDER_ADVICE, lambda folder: False),
}
DATASET_NAMES: tuple[str, ...] = tuple(_LAYOUTS)


def read_dataset(
    root: Path,
    dataset: str | None = None,
    *,
    needs_validation: Callable[[DataSet], bool] = lambda data: True,
    progress: Progress = no_progress,
) -> DataSet:
    """Read and check the data set in a folder; if it has no validation split, set a fifth of each class aside for one.

    Args:
        dataset: one of `DATASET_NAMES`; None recognises the data set by its files, any other folder as `imagefolder`.
        needs_validation: whether to set validation images aside if the data set has none.
        progress: called while image headers are read, which takes minutes on a network drive.

    UsageError: one line with everything that is wrong and what to do.
    """
    try:
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder; give a data set's folder or one with a folder per class")
        data = _read(root, dataset)
        data = check_dataset(data, _LAYOUTS[data.layout].advice, progress)
        if not data.val and needs_validation(data):
            data = split_off_validation(data)
        # after the split, which may separate two equal files of train/
        return replace(data, warnings=[*data.warnings, *duplicate_warnings(data)])
    except OSError as error:
        raise unreadable_error(error, root) from None


def find_recorded_dataset(
    training: dict[str, Any], class_names: Sequence[str], model: Path | None = None, *, torchvision: bool = True
) -> DataSet | None:
    """Return the data set of a training run if it still exists with the same classes and numbers of images.

    No image is opened, unless the run left unreadable ones out, which their headers tell again.

    Args:
        training: `training` of a checkpoint or metadata.
        class_names: C names in the order of the logits.
        model: the model's file, see `find_root`.
        torchvision: whether to read data sets that need torchvision, and so import torch.
    """
    root = find_root(training, model)
    if root is None:
        return None
    data = training["data"]
    layout = str(data.get("layout"))
    if not torchvision and layout in _TORCHVISION:
        return None
    try:
        recorded = _read(root, layout)
        if data.get("skipped"):
            recorded = check_dataset(recorded, "")
        if data.get("val") and not recorded.val:
            recorded = split_off_validation(recorded)
    except (OpalError, OSError):
        return None
    same_sizes = all(data.get(split) == len(recorded.select(split)) for split in ("train", "val", "test"))
    return recorded if same_sizes and recorded.class_names == list(class_names) else None


def _read(root: Path, dataset: str | None) -> DataSet:
    """Read the lists of the data set of this name, or of the one that the folder is recognised as."""
    if dataset is None:
        names = [name for name, layout in _LAYOUTS.items() if not _missing_files(root, layout) and layout.is_own(root)]
        if len(names) > 1:
            raise UsageError(f"{root}: looks like several data sets ({', '.join(names)}); choose one with --dataset")
        dataset = names[0] if names else "imagefolder"
    elif dataset not in _LAYOUTS:
        raise UsageError(f"unknown data set {dataset!r}; choose one of {', '.join(DATASET_NAMES)}")
    elif missing := _missing_files(root, _LAYOUTS[dataset]):
        raise UsageError(
            f"{root}: read as {dataset} but lacks {shorten_list(missing)}; unpack all of the official archives there, "
            "or, if its folders are classes, give --dataset imagefolder"
        )
    return _LAYOUTS[dataset].read(root)


def _missing_files(folder: Path, layout: _Layout) -> list[str]:
    """Return the files of a layout that `folder` lacks; one that ends in a slash is a folder, and `a|b` is either."""

    def exists(name: str) -> bool:
        return (folder / name).is_dir() if name.endswith("/") else (folder / name).is_file()

    return [name.replace("|", " or ") for name in layout.files if not any(map(exists, name.split("|")))]
