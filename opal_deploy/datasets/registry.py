"""The known data sets: from a folder to a checked data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opal_deploy.datasets.checks import check_dataset, duplicate_warnings
from opal_deploy.datasets.cub import CUB, CUB100
from opal_deploy.datasets.dogs import DOGS
from opal_deploy.datasets.image_folder import CSV, IMAGE_FOLDER
from opal_deploy.datasets.listing import Adapter, Listing, missing_files, unreadable_error
from opal_deploy.datasets.location import find_root
from opal_deploy.datasets.samples import DataSet, shorten_list, split_off_validation
from opal_deploy.datasets.torchvision_datasets import TORCHVISION_DATASETS
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.logs import Progress

_ADAPTERS = {adapter.name: adapter for adapter in (CUB, CUB100, DOGS, *TORCHVISION_DATASETS, CSV, IMAGE_FOLDER)}
DATASET_NAMES: tuple[str, ...] = tuple(_ADAPTERS)


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
        dataset: one of `DATASET_NAMES`; None recognises the data set by its files and reads any other folder as an
            ImageFolder.
        partition: number of the official partition, from 1.
        skip_missing: leave out listed images that do not exist, with a warning, instead of raising.
        needs_validation: set validation images aside if the data set has none.
        progress: called while image headers are read, which takes minutes on a network drive.

    Raises:
        UsageError: one line with everything that is wrong and what to do.
    """
    try:
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder; give a data set's folder or one with a folder per class")
        listing = _read(*_locate(root, dataset), partition)
        data = check_dataset(listing, skip_missing=skip_missing, progress=progress)
        if not data.val and needs_validation:
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
    data, root = training.get("data"), find_root(training, model)
    if not isinstance(data, dict) or root is None:
        return None
    layout = str(data.get("layout"))
    if not torchvision and layout in {adapter.name for adapter in TORCHVISION_DATASETS}:
        return None
    try:
        if data.get("skipped"):
            recorded = read_dataset(root, layout, skip_missing=True)
        else:
            recorded = _read(*_locate(root, layout)).data
            recorded = recorded if recorded.val else split_off_validation(recorded)
    except (OpalError, OSError):
        return None
    same_sizes = all(data.get(split) == len(recorded.select(split)) for split in ("train", "val", "test"))
    return recorded if same_sizes and recorded.class_names == list(class_names) else None


def _read(adapter: Adapter, folder: Path, partition: int = 1) -> Listing:
    if not 1 <= partition <= max(adapter.partitions, 1):
        several = ", ".join(a.name for a in _ADAPTERS.values() if a.partitions)
        raise UsageError(
            f"{adapter.title} has no partition {partition}; expected 1 to {max(adapter.partitions, 1)} (--partition is "
            f"for {several})"
        )
    if missing := missing_files(folder, *adapter.files):
        raise UsageError(
            f"{folder}: read as {adapter.title} but lacks {shorten_list(missing)}; unpack all of the official archives "
            "there, or, if its folders are classes, give --dataset imagefolder"
        )
    return adapter.read(folder, partition) if adapter.partitions else adapter.read(folder)


def _locate(root: Path, dataset: str | None) -> tuple[Adapter, Path]:
    """Return the adapter, and the folder in `root` or its subfolders of known names that it recognises."""
    if dataset is not None and dataset not in _ADAPTERS:
        raise UsageError(f"unknown data set {dataset!r}; choose one of {', '.join(DATASET_NAMES)}")
    adapters = list(_ADAPTERS.values()) if dataset is None else [_ADAPTERS[dataset]]
    below = [(adapter, root / name) for adapter in adapters for name in adapter.folders if (root / name).is_dir()]
    matches = [(adapter, root) for adapter in adapters if adapter.recognizes(root)]
    matches = matches or [(adapter, folder) for adapter, folder in below if adapter.recognizes(folder)]
    # one folder of each data set
    matches = list({adapter.name: (adapter, folder) for adapter, folder in reversed(matches)}.values())[::-1]
    if len(matches) > 1:
        names = ", ".join(f"{adapter.name} in {folder}" for adapter, folder in matches)
        raise UsageError(f"{root}: holds several data sets ({names}); choose one with --dataset, or give its folder")
    if dataset is not None:
        matches = matches or below[:1] or [(_ADAPTERS[dataset], root)]
    return matches[0] if matches else (IMAGE_FOLDER, root)
