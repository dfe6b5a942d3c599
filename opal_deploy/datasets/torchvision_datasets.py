"""Five data sets whose official lists torchvision's own classes read; whole images, without boxes.

    cars      Stanford Cars, 196 models              train, test
    pets      Oxford-IIIT Pets, 37 breeds            trainval, test
    flowers   Oxford Flowers-102, 102 species        train, val, test
    dtd       Describable Textures, 47 textures      train, val, test; ten partitions
    sun397    SUN397, 397 scenes                     train, test; ten partitions, read here

torchvision expects fixed folder names, which a temporary folder of symbolic links provides for a user's folder of any
name. Nothing is downloaded, and no image is opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opal_deploy.datasets.image_folder import subfolders
from opal_deploy.datasets.listing import (
    Adapter,
    LabeledPath,
    Listing,
    build_listing,
    group_names,
    has_files,
    missing_files,
    read_text,
    require_files,
    summarize_error,
)
from opal_deploy.datasets.samples import shorten_list
from opal_deploy.errors import UsageError, require

_CARS_TITLE = "Stanford Cars"
_CARS_TEST_LABELS = "cars_test_annos_withlabels.mat"
_PETS_TITLE = "Oxford-IIIT Pets"
_PETS_FILES = ("images/", "annotations/trainval.txt", "annotations/test.txt")
_FLOWERS_TITLE = "Oxford Flowers-102"
_FLOWERS_FILES = ("jpg/", "setid.mat", "imagelabels.mat")
_DTD_TITLE = "Describable Textures"
_DTD_SPLITS = ("train", "val", "test")
_SUN397_TITLE = "SUN397"


def read_with_torchvision(
    folder: Path, class_name: str, links: Mapping[str, Path], splits: Sequence[str] = ("train", "test"), **options: Any
) -> tuple[dict[str, list[LabeledPath]], dict[str, list[str]]]:
    """Read the splits of a data set with a class of torchvision.datasets.

    Args:
        folder: the data set's folder, for errors.
        class_name: the name of torchvision's class.
        links: path under torchvision's root to the user's file or folder.
        splits: the class's names of the splits; `all` for a class without splits.
        options: other arguments of the class.

    Returns:
        Image files with class indices, and class names in the indices' order, by split.

    Raises:
        UsageError: torchvision cannot read the lists.
    """
    for package in ("torchvision", "scipy"):
        require(package, "train", f"reading {folder}")
    import torchvision.datasets

    dataset_class = getattr(torchvision.datasets, class_name)
    with tempfile.TemporaryDirectory(prefix="opal-deploy-") as staging:
        root = Path(staging)
        for name, target in links.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(target.resolve())

        pairs: dict[str, list[LabeledPath]] = {}
        classes: dict[str, list[str]] = {}
        for split in splits:
            try:
                dataset = dataset_class(str(root), **({} if split == "all" else {"split": split}), **options)
                pairs[split] = [(_user_path(path, root, links), label) for path, label in _labeled_paths(dataset)]
                classes[split] = [str(name) for name in dataset.classes]
            except Exception as error:  # torchvision and SciPy raise nearly anything for a damaged list
                message = summarize_error(error)
                # the temporary folder is gone when somebody looks for it
                for name, target in links.items():
                    message = message.replace(str(root / name), str(target))
                raise UsageError(
                    f"{folder}: its lists for {split} are damaged or not the official ones ({message}); unpack the "
                    "official archives again"
                ) from None
        return pairs, classes


def _labeled_paths(dataset: Any) -> list[LabeledPath]:
    """Return files and labels, which torchvision's classes keep in different private attributes."""
    if hasattr(dataset, "_samples"):
        return [(Path(path), int(label)) for path, label in dataset._samples]
    files = dataset._image_files if hasattr(dataset, "_image_files") else dataset._images
    return [(Path(path), int(label)) for path, label in zip(files, dataset._labels, strict=True)]


def _user_path(path: Path, root: Path, links: Mapping[str, Path]) -> Path:
    name = next(name for name in links if path.is_relative_to(root / name))
    return links[name] / path.relative_to(root / name)


# Stanford Cars: class names are the devkit's
#
#     devkit/cars_meta.mat, devkit/cars_train_annos.mat
#     cars_test_annos_withlabels.mat          next to devkit/ or in it; a download of its own
#     cars_train/*.jpg, cars_test/*.jpg


def _is_cars(folder: Path) -> bool:
    return has_files(folder, "devkit/cars_meta.mat") or has_files(folder, "cars_train/", "cars_test/")


def _read_cars(folder: Path) -> Listing:
    test_labels = folder / ("devkit" if has_files(folder, f"devkit/{_CARS_TEST_LABELS}") else "") / _CARS_TEST_LABELS
    missing = missing_files(
        folder, ("devkit/cars_meta.mat", "devkit/cars_train_annos.mat", "cars_train/", "cars_test/")
    )
    missing += [] if test_labels.is_file() else [_CARS_TEST_LABELS]
    require_files(folder, _CARS_TITLE, missing)
    # Kaggle packs the images into a second folder of the same name
    train, test = (
        nested if (nested := folder / name / name).is_dir() else folder / name for name in ("cars_train", "cars_test")
    )
    links = {"devkit": folder / "devkit", "cars_train": train, "cars_test": test, _CARS_TEST_LABELS: test_labels}
    links = {f"stanford_cars/{name}": path for name, path in links.items()}
    pairs, classes = read_with_torchvision(folder, "StanfordCars", links)
    return build_listing("cars", folder, classes["train"], pairs, image_folders=(train, test))


# Oxford-IIIT Pets: `trainval` is trained on; class names are torchvision's in the order of the class ids
#
#     images/<Breed>_<number>.jpg
#     annotations/trainval.txt, annotations/test.txt      <name> <class id> <species> <breed id>
#
# The official images/ holds a few .mat files, which are skipped, and GIFs and PNGs called .jpg, which are read as such.


def _is_pets(folder: Path) -> bool:
    return has_files(folder, "images/") and any(has_files(folder, name) for name in _PETS_FILES[1:])


def _read_pets(folder: Path) -> Listing:
    require_files(folder, _PETS_TITLE, missing_files(folder, _PETS_FILES))
    links = {f"oxford-iiit-pet/{name}": folder / name for name in ("images", "annotations")}
    pairs, classes = read_with_torchvision(folder, "OxfordIIITPet", links, ("trainval", "test"))
    # torchvision numbers the names that it meets: with a missing id, all names after it would move
    breeds, problems = group_names(pairs["trainval"], _breed, "trainval.txt")
    of_test = {
        f"{_breed(p)} ({label + 1})": None for p, label in pairs["test"] if _breed(p) not in breeds.get(label, ())
    }
    if of_test:
        problems.append(f"test.txt has breeds that trainval.txt lacks under these ids: {shorten_list([*of_test])}")
    if problems:
        raise UsageError(f"{folder}: {'; '.join(problems)}; unpack the official annotations.tar.gz again")
    splits = {"train": pairs["trainval"], "test": pairs["test"]}
    return build_listing("pets", folder, classes["trainval"], splits, image_folders=(folder / "images",))


def _breed(path: Path) -> str:
    return path.stem.rsplit("_", 1)[0]


# Oxford Flowers-102: torchvision accepts only the official lists, by their checksums; class names are torchvision's, in
# the order of the labels 1 ... 102, because the archive has none
#
#     jpg/image_00001.jpg ... jpg/image_08189.jpg
#     setid.mat, imagelabels.mat


def _is_flowers(folder: Path) -> bool:
    return len(missing_files(folder, _FLOWERS_FILES)) < 2


def _read_flowers(folder: Path) -> Listing:
    missing = missing_files(folder, _FLOWERS_FILES)
    require_files(folder, _FLOWERS_TITLE, missing, "put 102flowers.tgz's jpg/ and the two .mat files there")
    links = {f"flowers-102/{name.rstrip('/')}": folder / name for name in _FLOWERS_FILES}
    pairs, classes = read_with_torchvision(folder, "Flowers102", links, ("train", "val", "test"))
    return build_listing("flowers", folder, classes["train"], pairs, image_folders=(folder / "jpg",))


# Describable Textures (DTD r1.0.1): every partition has 40 images of each texture in each of its three splits
#
#     images/<texture>/*.jpg
#     labels/train<p>.txt, labels/val<p>.txt, labels/test<p>.txt      p = 1 ... 10


def _is_dtd(folder: Path) -> bool:
    return has_files(folder, "images/", *(f"labels/{split}1.txt" for split in _DTD_SPLITS))


def _read_dtd(folder: Path, partition: int) -> Listing:
    files = ("images/", *(f"labels/{split}{partition}.txt" for split in _DTD_SPLITS))
    require_files(folder, _DTD_TITLE, missing_files(folder, files))
    links = {f"dtd/dtd/{name}": folder / name for name in ("images", "labels")}
    pairs, classes = read_with_torchvision(folder, "DTD", links, _DTD_SPLITS, partition=partition)
    # torchvision numbers the names that it meets, separately in each split
    if other := [split for split in _DTD_SPLITS if classes[split] != classes["train"]]:
        raise UsageError(
            f"{folder}: {' and '.join(f'labels/{split}{partition}.txt' for split in other)} and "
            f"labels/train{partition}.txt have different textures; unpack the official archive again"
        )
    return build_listing("dtd", folder, classes["train"], pairs, image_folders=(folder / "images",))


# SUN397: torchvision reads the classes and knows no split; a partition has 50 training and 50 test images a class
#
#     SUN397/ClassName.txt, SUN397/<letter>/<scene>/sun_*.jpg
#     Training_<pp>.txt, Testing_<pp>.txt     pp = 01 ... 10, of Partitions.zip, in SUN397/, Partitions/ or next to
#
# A partition uses only a part of the archive, so unlisted images give no warning.


def _is_sun397(folder: Path) -> bool:
    """Return whether a/ lies next to the class names, or next to other letters' scenes only.

    An ImageFolder of letters has images in its folders, not folders that begin with the letter.
    """
    if not has_files(folder, "a/"):
        return False
    letters = [subfolder for subfolder in subfolders(folder) if subfolder.name != "Partitions"]
    return has_files(folder, "ClassName.txt") or (len(letters) > 1 and all(map(_is_letter, letters)))


def _is_letter(folder: Path) -> bool:
    """Return whether a folder's name is a letter and it holds only folders that begin with that letter."""
    visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
    are_scenes = all(path.name.startswith(folder.name) and path.is_dir() for path in visible)
    return len(folder.name) == 1 and bool(visible) and are_scenes


def _read_sun397(folder: Path, partition: int) -> Listing:
    files = {"train": f"Training_{partition:02}.txt", "test": f"Testing_{partition:02}.txt"}
    places = (folder, folder / "Partitions", folder.parent, folder.parent / "Partitions")
    lists = next((place for place in places if has_files(place, *files.values())), folder)
    missing = [*missing_files(folder, ["ClassName.txt"]), *missing_files(lists, files.values())]
    advice = "fetch Partitions.zip from https://vision.princeton.edu/projects/2010/SUN/ and unpack it there"
    require_files(folder, _SUN397_TITLE, missing, advice)
    class_names = read_with_torchvision(folder, "SUN397", {"SUN397": folder}, ("all",))[1]["all"]
    labels = {name: label for label, name in enumerate(class_names)}
    splits: dict[str, list[LabeledPath]] = {}
    problems = []
    for split, name in files.items():
        lines = read_text(lists / name, "unpack Partitions.zip again").splitlines()
        # /<letter>/<scene>/<file>, where a scene may have an inner part: /a/apartment_building/outdoor/sun_x.jpg
        paths = [Path(line.strip().lstrip("/")) for line in lines if line.strip()]
        scenes = ["/".join(path.parts[1:-1]) for path in paths]
        if unknown := sorted(set(scenes) - labels.keys()):
            problems.append(f"{name} has scenes that ClassName.txt does not name: {shorten_list(unknown)}")
        pairs = zip(paths, scenes, strict=True)
        splits[split] = [(folder / path, labels[scene]) for path, scene in pairs if scene in labels]
    return build_listing("sun397", folder, class_names, splits, problems=problems)


CARS = Adapter("cars", _CARS_TITLE, _is_cars, _read_cars, ("stanford_cars", "StanfordCars", "stanford-cars", "cars"))
PETS = Adapter("pets", _PETS_TITLE, _is_pets, _read_pets, ("oxford-iiit-pet", "pets"))
FLOWERS = Adapter("flowers", _FLOWERS_TITLE, _is_flowers, _read_flowers, ("flowers-102", "flowers102", "flowers"))
# torchvision's root holds dtd/, which holds the archive's own dtd/
DTD = Adapter("dtd", _DTD_TITLE, _is_dtd, _read_dtd, ("dtd/dtd", "dtd"), partitions=10)
SUN397 = Adapter("sun397", _SUN397_TITLE, _is_sun397, _read_sun397, ("SUN397",), partitions=10)
