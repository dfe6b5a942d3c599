"""The known data sets, and the way from a folder to a checked data set.

    cub, cub100, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397    with their official splits
    imagefolder                                                                  any folder with a folder per class

`read_dataset` finds the adapter, lets it read the official lists, checks every file, and sets validation images aside
where the data set has none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opal_deploy.datasets.caltech101 import CALTECH101
from opal_deploy.datasets.checks import check_dataset, duplicate_warnings
from opal_deploy.datasets.cub import CUB
from opal_deploy.datasets.cub100 import CUB100
from opal_deploy.datasets.dogs import DOGS
from opal_deploy.datasets.image_folder import IMAGE_FOLDER
from opal_deploy.datasets.imagenet import IMAGENET
from opal_deploy.datasets.listing import Adapter, unreadable_error
from opal_deploy.datasets.samples import DataSet, split_off_validation
from opal_deploy.datasets.torchvision_datasets import CARS, DTD, FLOWERS, PETS, SUN397
from opal_deploy.errors import UsageError
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
    """Read and check a data set, and set a fifth of each class aside for validation where it has no validation split.

    Args:
        root: the data set's folder, or the parent folder that torchvision calls `root`.
        dataset: one of `DATASET_NAMES`; None recognizes the data set by its files and reads any other folder as an
            ImageFolder.
        partition: number of the official partition, from 1, where a data set has several.
        skip_missing: leave listed images that do not exist out, with a warning, instead of raising.
        needs_validation: set validation images aside where the data set has none.
        progress: called while image headers are read, which takes minutes on a network drive.

    Raises:
        UsageError: one line with everything that is wrong and what to do.
    """
    if dataset is not None and dataset not in _ADAPTERS:
        raise UsageError(f"no data set is called {dataset!r}; choose one of {', '.join(DATASET_NAMES)}")
    try:
        return _read_and_check(root, dataset, partition, skip_missing, needs_validation, progress)
    except OSError as error:
        raise unreadable_error(error, root) from None


def list_dataset(root: Path, dataset: str, *, torchvision: bool = True) -> DataSet:
    """Return what the lists of a data set say, its first partition, without looking at the image files.

    Args:
        root: see `read_dataset`.
        dataset: one of `DATASET_NAMES`.
        torchvision: whether data sets that torchvision reads may be read, which imports torch.

    Raises:
        UsageError: the lists cannot be read, or the data set may not be.
    """
    if dataset not in _ADAPTERS or (dataset in _TORCHVISION and not torchvision):
        raise UsageError(f"{root}: the lists of {dataset!r} are not read here")
    adapter, folder = _locate(root, _ADAPTERS[dataset])
    data = adapter.read(folder, 1).data
    return data if data.val else split_off_validation(data)


def _read_and_check(
    root: Path,
    dataset: str | None,
    partition: int,
    skip_missing: bool,
    needs_validation: bool,
    progress: Progress | None,
) -> DataSet:
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder; give a data set's folder or one with a folder per class")
    adapter, folder = _recognize(root) if dataset is None else _locate(root, _ADAPTERS[dataset])
    _check_partition(adapter, partition)
    data = check_dataset(adapter.read(folder, partition), skip_missing=skip_missing, progress=progress)
    if not data.val and needs_validation:
        data = split_off_validation(data)
    # after the split, because two equal files of train/ may now be in different splits
    return replace(data, warnings=[*data.warnings, *duplicate_warnings(data)])


def _recognize(root: Path) -> tuple[Adapter, Path]:
    """Return the only data set in `root`, or else in its subfolders of known names."""
    matches = [(adapter, root) for adapter in _ADAPTERS.values() if adapter.recognizes(root)]
    if not matches:
        for adapter in _ADAPTERS.values():
            folders = [folder for folder in _known_subfolders(root, adapter) if adapter.recognizes(folder)]
            matches += [(adapter, folder) for folder in folders[:1]]
    if len(matches) > 1:
        names = ", ".join(f"{adapter.name} in {folder}" for adapter, folder in matches)
        raise UsageError(f"{root}: it holds several data sets ({names}); choose one with --dataset, or give its folder")
    return matches[0] if matches else (IMAGE_FOLDER, root)


def _locate(root: Path, adapter: Adapter) -> tuple[Adapter, Path]:
    """Return where the data set lies in or below `root`; where nothing is recognized, the likeliest folder."""
    subfolders = _known_subfolders(root, adapter)
    recognized = [folder for folder in (root, *subfolders) if adapter.recognizes(folder)]
    return adapter, (recognized or subfolders or [root])[0]


def _known_subfolders(root: Path, adapter: Adapter) -> list[Path]:
    return [root / name for name in adapter.folders if (root / name).is_dir()]


def _check_partition(adapter: Adapter, partition: int) -> None:
    if not adapter.partitions and partition != 1:
        several = ", ".join(a.name for a in _ADAPTERS.values() if a.partitions)
        raise UsageError(
            f"{adapter.title} has no partition {partition}, it has a single split; only {several} have --partition"
        )
    if adapter.partitions and not 1 <= partition <= adapter.partitions:
        raise UsageError(f"{adapter.title} has the partitions 1 to {adapter.partitions}, {partition} is none of them")
