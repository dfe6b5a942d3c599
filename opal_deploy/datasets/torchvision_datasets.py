"""Data sets whose official lists torchvision's own classes read; nothing is downloaded, no image is opened.

    cars         Stanford Cars          devkit/, cars_train/, cars_test/, cars_test_annos_withlabels.mat
    pets         Oxford-IIIT Pets       images/, annotations/; `trainval` is trained on
    flowers      Oxford Flowers-102     jpg/, setid.mat, imagelabels.mat
    dtd          Describable Textures   images/, labels/; ten partitions
    imagenet     ImageNet-1K            train/<wnid>/, val/<wnid>/, and ILSVRC2012_devkit_t12.tar.gz or the meta.bin
                                        that torchvision makes of it; the official validation images are for testing
    caltech101   Caltech-101            101_ObjectCategories/<class>/image_<nnnn>.jpg; NO official split
    sun397       SUN397                 ClassName.txt, <letter>/<scene>/, and Partitions.zip's Training_<pp>.txt and
                                        Testing_<pp>.txt in the folder or next to it; ten partitions

Class names are torchvision's; ImageNet's begin with the wnid, since two of its classes are called "crane". torchvision
writes ImageNet's meta.bin next to the devkit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opal_deploy.datasets.image_folder import subfolders
from opal_deploy.datasets.listing import ADVICE, Adapter, Listing, build_listing, missing_files, read_text
from opal_deploy.datasets.samples import SPLIT_FRACTION, SPLIT_SEED, Sample, shorten_list, stratified_split
from opal_deploy.errors import UsageError, require


def _read_lists(
    name: str, class_name: str, own_name: str, splits: Mapping[str, str], folder: Path, partition: int | None = None
) -> Listing:
    """Read a data set with a class of torchvision.datasets.

    Args:
        name, class_name: our name of the data set, and torchvision's class.
        own_name: the folder in its root that torchvision reads; a link of this name leads to the user's folder.
        splits: our names of the splits to torchvision's; an empty name for a class without splits.
        folder, partition: see `Adapter.read`.

    Raises:
        UsageError: torchvision cannot read the lists, or they name different classes.
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
            options = {"split": official, "partition": partition}
            try:
                dataset = getattr(torchvision.datasets, class_name)(
                    str(link if class_name == "ImageNet" else root),
                    **{option: value for option, value in options.items() if value},
                )
                names[split], samples = _list_samples(dataset, link)
            except Exception as error:  # torchvision and SciPy raise nearly anything for a damaged list
                text = " ".join(f"{type(error).__name__}: {error}".split()).split(" You can use download")[0]
                # the temporary folder is gone when somebody looks for it
                text = text.removeprefix("RuntimeError: ").replace(str(link), str(folder)).rstrip(".")
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
    return build_listing(name, folder, names["train"], listed)


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


def _read_caltech101(folder: Path) -> Listing:
    """Set a stratified fifth aside for testing, since there is no official split."""
    listing = _read_lists("caltech101", "Caltech101", "caltech101", {"train": ""}, folder)
    data = listing.data
    labels = [sample.label for sample in data.train]
    train, test = (
        [data.train[i] for i in part]
        for part in stratified_split(labels, data.class_names, root=folder, part="test", advice=ADVICE)
    )
    warning = (
        f"Caltech-101 has no official split: the test split is a stratified {SPLIT_FRACTION:.0%} of each class (seed "
        f"{SPLIT_SEED}); results cannot be compared with published ones"
    )
    return replace(listing, data=replace(data, train=train, test=test, warnings=[warning]))


def _read_sun397(folder: Path, partition: int) -> Listing:
    """Read the lists here, since torchvision's class knows no split."""
    advice = "fetch Partitions.zip from https://vision.princeton.edu/projects/2010/SUN/ and unpack it there"
    names = [line.strip()[3:] for line in read_text(folder / "ClassName.txt", ADVICE).splitlines()]
    splits: dict[str, list[Sample]] = {}
    for split, file in (("train", f"Training_{partition:02}.txt"), ("test", f"Testing_{partition:02}.txt")):
        places = (folder / "Partitions", folder.parent, folder.parent / "Partitions", folder)
        path = next((place / file for place in places if (place / file).is_file()), folder / file)
        lines = [line.strip().lstrip("/") for line in read_text(path, advice).splitlines() if line.strip()]
        # <letter>/<scene>/<file>, where a scene may have an inner part: a/apartment_building/outdoor/sun_x.jpg
        scenes = ["/".join(line.split("/")[1:-1]) for line in lines]
        if unknown := sorted({*scenes} - {*names}):
            raise UsageError(f"{path}: scenes that ClassName.txt does not name: {shorten_list(unknown)}; {ADVICE}")
        splits[split] = [Sample(folder / line, names.index(scene)) for line, scene in zip(lines, scenes, strict=True)]
    return build_listing("sun397", folder, names, splits)


def _is_imagenet(folder: Path) -> bool:
    """Return whether train/ lies next to a devkit, or has all of the thousand wnids; Imagenette is an ImageFolder."""
    if not missing_files(folder, "train/", _DEVKIT):
        return True
    return not missing_files(folder, "train/", "val/") and len(subfolders(folder / "train")) == 1000


_DEVKIT = "meta.bin|ILSVRC2012_devkit_t12.tar.gz"
_TRAIN_TEST = {"train": "train", "test": "test"}
_ALL = {"train": "train", "val": "val", "test": "test"}
TORCHVISION_DATASETS = (
    Adapter(
        "cars", "Stanford Cars", partial(_read_lists, "cars", "StanfordCars", "stanford_cars", _TRAIN_TEST),
        ("devkit/", "cars_train/", "cars_test/", "cars_test_annos_withlabels.mat"),
        ("stanford_cars", "StanfordCars", "stanford-cars", "cars"),
    ),
    Adapter(
        "pets", "Oxford-IIIT Pets",
        partial(_read_lists, "pets", "OxfordIIITPet", "oxford-iiit-pet", {"train": "trainval", "test": "test"}),
        ("images/", "annotations/trainval.txt", "annotations/test.txt"), ("oxford-iiit-pet", "pets"),
    ),
    Adapter(
        "flowers", "Oxford Flowers-102", partial(_read_lists, "flowers", "Flowers102", "flowers-102", _ALL),
        ("jpg/", "setid.mat", "imagelabels.mat"), ("flowers-102", "flowers102", "flowers"),
    ),
    Adapter(
        "imagenet", "ImageNet-1K",
        partial(_read_lists, "imagenet", "ImageNet", "imagenet", {"train": "train", "test": "val"}),
        ("train/", "val/", _DEVKIT), ("imagenet", "ImageNet", "ILSVRC2012"), is_own=_is_imagenet,
    ),
    Adapter(
        "caltech101", "Caltech-101", _read_caltech101, ("101_ObjectCategories/",),
        ("caltech101", "caltech-101", "Caltech101"),
    ),
    # torchvision's root holds dtd/, which holds the archive's own dtd/
    Adapter(
        "dtd", "Describable Textures", partial(_read_lists, "dtd", "DTD", "dtd/dtd", _ALL),
        ("images/", "labels/train1.txt"), ("dtd/dtd", "dtd"), 10,
    ),
    Adapter("sun397", "SUN397", _read_sun397, ("ClassName.txt", "a/"), ("SUN397",), 10),
)  # fmt: skip
