"""The known data sets: from a folder to a checked data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opal_deploy.datasets.checks import check_dataset, duplicate_warnings
from opal_deploy.datasets.cub import CUB
from opal_deploy.datasets.image_folder import CSV, IMAGE_FOLDER
from opal_deploy.datasets.published import DOGS, TORCHVISION_DATASETS
from opal_deploy.datasets.samples import (
    DataSet,
    Listing,
    find_root,
    missing_files,
    shorten_list,
    split_off_validation,
    unreadable_error,
)
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.logs import Progress

_ADAPTERS = {adapter.name: adapter for adapter in (CUB, DOGS, *TORCHVISION_DATASETS, CSV, IMAGE_FOLDER)}
DATASET_NAMES: tuple[str, ...] = tuple(_ADAPTERS)


def read_dataset(
    root: Path,
    dataset: str | None = None,
    *,
    needs_validation: Callable[[DataSet], bool] = lambda data: True,
    progress: Progress | None = None,
) -> DataSet:
    """Read and check a data set; if it has no validation split, set a fifth of each class aside for validation.

    Args:
        root: the data set's folder.
        dataset: one of `DATASET_NAMES`; None recognises the data set by its files and reads any other folder as an
            ImageFolder.
        needs_validation: whether to set validation images aside if the data set has none.
        progress: called while image headers are read, which takes minutes on a network drive.

    Raises:
        UsageError: one line with everything that is wrong and what to do.
    """
    try:
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder; give a data set's folder or one with a folder per class")
        data = check_dataset(_read(root, dataset), progress)
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
    data, root = training.get("data"), find_root(training, model)
    if not isinstance(data, dict) or root is None:
        return None
    layout = str(data.get("layout"))
    if not torchvision and layout in {adapter.name for adapter in TORCHVISION_DATASETS}:
        return None
    try:
        if data.get("skipped"):
            recorded = read_dataset(root, layout, needs_validation=lambda _: bool(data.get("val")))
        else:
            recorded = _read(root, layout).data
            recorded = recorded if recorded.val or not data.get("val") else split_off_validation(recorded)
    except (OpalError, OSError):
        return None
    same_sizes = all(data.get(split) == len(recorded.select(split)) for split in ("train", "val", "test"))
    return recorded if same_sizes and recorded.class_names == list(class_names) else None


def _read(root: Path, dataset: str | None) -> Listing:
    """Read the lists with the adapter of this name, or with the one that recognises the folder."""
    if dataset is None:
        own = [a for a in _ADAPTERS.values() if not missing_files(root, *a.files) and a.is_own(root)] or [IMAGE_FOLDER]
        if len(own) > 1:
            names = ", ".join(adapter.name for adapter in own)
            raise UsageError(f"{root}: looks like several data sets ({names}); choose one with --dataset")
        return own[0].read(root)
    if dataset not in _ADAPTERS:
        raise UsageError(f"unknown data set {dataset!r}; choose one of {', '.join(DATASET_NAMES)}")
    if missing := missing_files(root, *_ADAPTERS[dataset].files):
        raise UsageError(
            f"{root}: read as {dataset} but lacks {shorten_list(missing)}; unpack all of the official archives there, "
            "or, if its folders are classes, give --dataset imagefolder"
        )
    return _ADAPTERS[dataset].read(root)
