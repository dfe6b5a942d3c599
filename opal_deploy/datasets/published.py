"""Published data sets with lists of their own; nothing is downloaded, no image is opened.

    dogs         Stanford Dogs          Images/, Annotation/, train_list.mat, test_list.mat (or in lists/); cropped to
                                        the dog's box, to the first of several
    cars         Stanford Cars          devkit/, cars_train/, cars_test/, cars_test_annos_withlabels.mat
    pets         Oxford-IIIT Pets       images/, annotations/; `trainval` is trained on
    flowers      Oxford Flowers-102     jpg/, setid.mat, imagelabels.mat
    dtd          Describable Textures   images/, labels/; the first of its ten official partitions
    imagenet     ImageNet-1K            train/<wnid>/, val/<wnid>/, and ILSVRC2012_devkit_t12.tar.gz or the meta.bin
                                        that torchvision makes of it; the official validation images are for testing
    caltech101   Caltech-101            101_ObjectCategories/<class>/image_<nnnn>.jpg; NO official split
    sun397       SUN397                 ClassName.txt, <letter>/<scene>/; its ten official partitions are not read

All but Stanford Dogs are read by torchvision's own classes, with their class names; ImageNet's begin with the wnid,
since two of its classes are called "crane". torchvision writes ImageNet's meta.bin next to the devkit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from opal_deploy.datasets.samples import (
    ADVICE,
    SPLIT_FRACTION,
    SPLIT_SEED,
    Adapter,
    Listing,
    Sample,
    build_listing,
    stratified_split,
)
from opal_deploy.errors import UsageError, require
from opal_deploy.preprocess.geometry import Box


def _read_dogs(folder: Path) -> Listing:
    """Read lists and boxes."""
    splits = {split: _read_dogs_list(folder, f"{split}_list.mat") for split in ("train", "test")}
    breeds = sorted({(sample.label, sample.path.parent.name) for samples in splits.values() for sample in samples})
    if [label for label, _ in breeds] != list(range(len(breeds))):
        raise UsageError(f"{folder}: the lists' class ids and folders are not one to one; {ADVICE}")
    return build_listing("dogs", folder, [name for _, name in breeds], splits, crop="boxes")


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
        raise UsageError(f"{path}: not a Matlab file with file_list and as many labels ({text}); {ADVICE}") from None
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
            raise UsageError(f"{path}: not a readable annotation ({error}); {ADVICE}") from None
        return None
    return x0, y0, x1, y1


def _read_lists(name: str, class_name: str, own_name: str, splits: Mapping[str, str], folder: Path) -> Listing:
    """Read a data set with a class of torchvision.datasets.

    torchvision reads the folder `own_name` in a root; there a link of this name leads to the user's folder. `splits`
    maps our names of the splits to torchvision's; an empty name is for a class without splits.
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
        for split, official in splits.items():
            try:
                dataset = getattr(torchvision.datasets, class_name)(
                    str(link if class_name == "ImageNet" else root), **({"split": official} if official else {})
                )
                names[split], samples = _list_samples(dataset, link)
            except Exception as error:  # torchvision and SciPy raise nearly anything for a damaged list
                text = " ".join(str(error).split()).split(" You can use download")[0]
                # the temporary folder is gone when somebody looks for it
                text = text.replace(str(link), str(folder)).rstrip(".")
                raise UsageError(
                    f"{folder}: torchvision cannot read its {official or 'lists'} ({text}); {ADVICE}"
                ) from None
            listed[split] = [Sample(folder / Path(path).relative_to(link), int(label)) for path, label in samples]
    labels = {sample.label for sample in listed["train"]}
    # torchvision numbers the names that it meets: a class that one list lacks would rename all after it
    if any(of_split != names["train"] for of_split in names.values()) or (
        labels != {*range(len(names["train"]))} and name == "pets"
    ):
        raise UsageError(f"{folder}: its lists have different classes, or a class id without a class; {ADVICE}")
    listing = build_listing(name, folder, names["train"], listed)
    return listing if "test" in splits else _split_off_test(listing)


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


def _split_off_test(listing: Listing) -> Listing:
    """Set a stratified fifth aside for testing, where torchvision's class has no split."""
    train, test = stratified_split(listing.data)
    warning = (
        f"no official split: the test split is a stratified {SPLIT_FRACTION:.0%} of each class (seed {SPLIT_SEED}); "
        "results cannot be compared with published ones"
    )
    return replace(listing, data=replace(listing.data, train=train, test=test, warnings=[warning]))


_DEVKIT = "meta.bin|ILSVRC2012_devkit_t12.tar.gz"
_ALL = {"train": "train", "val": "val", "test": "test"}
_DOGS_FILES = ("Images/", "Annotation/", "train_list.mat|lists/train_list.mat", "test_list.mat|lists/test_list.mat")
_CARS_FILES = ("devkit/", "cars_train/", "cars_test/", "cars_test_annos_withlabels.mat")
_PETS_FILES = ("images/", "annotations/trainval.txt", "annotations/test.txt")


def _torchvision(name: str, class_name: str, own_name: str, splits: Mapping[str, str], *files: str) -> Adapter:
    return Adapter(name, partial(_read_lists, name, class_name, own_name, splits), files)


DOGS = Adapter("dogs", _read_dogs, _DOGS_FILES)
TORCHVISION_DATASETS = (
    _torchvision("cars", "StanfordCars", "stanford_cars", {"train": "train", "test": "test"}, *_CARS_FILES),
    _torchvision("pets", "OxfordIIITPet", "oxford-iiit-pet", {"train": "trainval", "test": "test"}, *_PETS_FILES),
    _torchvision("flowers", "Flowers102", "flowers-102", _ALL, "jpg/", "setid.mat", "imagelabels.mat"),
    _torchvision("imagenet", "ImageNet", "imagenet", {"train": "train", "test": "val"}, "train/", "val/", _DEVKIT),
    _torchvision("caltech101", "Caltech101", "caltech101", {"train": ""}, "101_ObjectCategories/"),
    # torchvision's root holds dtd/, which holds the archive's own dtd/
    _torchvision("dtd", "DTD", "dtd/dtd", _ALL, "images/", "labels/train1.txt"),
    _torchvision("sun397", "SUN397", "SUN397", {"train": ""}, "ClassName.txt", "a/"),
)
