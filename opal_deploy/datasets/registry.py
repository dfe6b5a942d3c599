"""The known data sets: from a folder to a checked data set.

    cub, cub100, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397    with their official splits
    imagefolder                                                                  any folder with a folder per class

`read_dataset` finds the adapter, reads the official lists with it, checks every file, and sets validation images aside
if the data set has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opal_deploy.datasets.checks import check_dataset, duplicate_warnings
from opal_deploy.datasets.cub import CUB, CUB100
from opal_deploy.datasets.dogs import DOGS
from opal_deploy.datasets.image_folder import CALTECH101, IMAGE_FOLDER
from opal_deploy.datasets.imagenet import IMAGENET
from opal_deploy.datasets.listing import Adapter, Listing, unreadable_error
from opal_deploy.datasets.location import find_root
from opal_deploy.datasets.samples import DataSet, split_off_validation
from opal_deploy.datasets.torchvision_datasets import CARS, DTD, FLOWERS, PETS, SUN397
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.logs import Progress

_ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (CUB, CUB100, DOGS, CARS, PETS, FLOWERS, IMAGENET, CALTECH101, DTD, SUN397, IMAGE_FOLDER)
}
DATASET_NAMES: tuple[str, ...] = tuple(_ADAPTERS)
_TORCHVISION = frozenset(adapter.name for adapter in (CARS, PETS, FLOWERS, DTD, SUN397))


def read_dataset(
    root: Path,
    dataset: str | None = None,
    *,
    partition: int = 1,
    skip_missing: bool = False,
    needs_validation: bool = True,
    progress: Progress | None = None,
) -> DataSet:
    """Read and check a data set; if it has no validation split, set a fifth of each class aside for validation.

    Args:
        root: the data set's folder, or the parent folder that torchvision calls `root`.
        dataset: one of `DATASET_NAMES`; None recognizes the data set by its files and reads any other folder as an
            ImageFolder.
        partition: number of the official partition, from 1.
        skip_missing: leave out listed images that do not exist, with a warning, instead of raising.
        needs_validation: set validation images aside if the data set has none.
        progress: called while image headers are read, which takes minutes on a network drive.

    Raises:
        UsageError: one line with everything that is wrong and what to do.
    """
    if dataset is not None and dataset not in _ADAPTERS:
        raise UsageError(f"unknown data set {dataset!r}; choose one of {', '.join(DATASET_NAMES)}")
    try:
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder; give a data set's folder or one with a folder per class")
        adapter, folder = _recognize(root) if dataset is None else _locate(root, _ADAPTERS[dataset])
        data = check_dataset(_read(adapter, folder, partition), skip_missing=skip_missing, progress=progress)
        if not data.val and needs_validation:
            data = split_off_validation(data)
        # after the split, which may separate two equal files of train/
        return replace(data, warnings=[*data.warnings, *duplicate_warnings(data)])
    except OSError as error:
        raise unreadable_error(error, root) from None


def list_dataset(root: Path, dataset: str, *, torchvision: bool = True) -> DataSet:
    """Return a data set as its lists describe it, first partition, without looking at the image files.

    Args:
        root: see `read_dataset`.
        dataset: one of `DATASET_NAMES`.
        torchvision: whether to read data sets that need torchvision, and so import torch.

    Raises:
        UsageError: the lists cannot be read, or need torchvision.
    """
    if dataset not in _ADAPTERS or (dataset in _TORCHVISION and not torchvision):
        raise UsageError(f"{root}: the lists of {dataset!r} are not read here")
    adapter, folder = _locate(root, _ADAPTERS[dataset])
    data = _read(adapter, folder).data
    return data if data.val else split_off_validation(data)


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
    data, root = training.get("data"), find_root(training, model)
    if not isinstance(data, dict) or root is None:
        return None
    layout = str(data.get("layout"))
    try:
        if data.get("skipped"):
            found = read_dataset(root, layout, skip_missing=True)
        else:
            found = list_dataset(root, layout, torchvision=torchvision)
    except (OpalError, OSError):
        return None
    sizes = {"train": len(found.train), "val": len(found.val), "test": len(found.test)}
    same = found.class_names == list(class_names) and all(data.get(name) == size for name, size in sizes.items())
    return found if same else None


def _read(adapter: Adapter, folder: Path, partition: int = 1) -> Listing:
    if 1 <= partition <= adapter.partitions:
        return adapter.read(folder, partition)
    if adapter.partitions:
        raise UsageError(f"{adapter.title} has no partition {partition}; expected 1 to {adapter.partitions}")
    if partition != 1:
        several = ", ".join(a.name for a in _ADAPTERS.values() if a.partitions)
        raise UsageError(
            f"{adapter.title} has no partition {partition}, only a single split; --partition is for {several}"
        )
    return adapter.read(folder)


def _recognize(root: Path) -> tuple[Adapter, Path]:
    """Return the only data set in `root`, or else in its subfolders of known names."""
    matches = [(adapter, root) for adapter in _ADAPTERS.values() if adapter.recognizes(root)]
    if not matches:
        for adapter in _ADAPTERS.values():
            folders = [folder for folder in _known_subfolders(root, adapter) if adapter.recognizes(folder)]
            matches += [(adapter, folder) for folder in folders[:1]]
    if len(matches) > 1:
        names = ", ".join(f"{adapter.name} in {folder}" for adapter, folder in matches)
        raise UsageError(f"{root}: holds several data sets ({names}); choose one with --dataset, or give its folder")
    return matches[0] if matches else (IMAGE_FOLDER, root)


def _locate(root: Path, adapter: Adapter) -> tuple[Adapter, Path]:
    """Return the adapter with the folder it recognizes in or below `root`, or else the likeliest folder."""
    subfolders = _known_subfolders(root, adapter)
    recognized = [folder for folder in (root, *subfolders) if adapter.recognizes(folder)]
    return adapter, (recognized or subfolders or [root])[0]


def _known_subfolders(root: Path, adapter: Adapter) -> list[Path]:
    return [root / name for name in adapter.folders if (root / name).is_dir()]
