"""From a folder to a data set that is known to be usable before the first epoch.

    cub, cub100, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397       under their official splits
    imagefolder                                                                     anything else

Each is a module of that name that reads the data set's own lists (see its docstring); `checks` looks at the files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opal_deploy.datasets import (
    caltech101,
    cars,
    checks,
    cub,
    cub100,
    dogs,
    dtd,
    flowers,
    image_folder,
    imagenet,
    pets,
    sun397,
)
from opal_deploy.datasets import checks as duplicates
from opal_deploy.datasets.listing import Adapter, cannot_be_read
from opal_deploy.datasets.samples import DataSet, Report, Sample, stratified_split
from opal_deploy.errors import UsageError

__all__ = ["NAMES", "DataSet", "Sample", "read", "stratified_split"]

_ADAPTERS = {
    module.ADAPTER.name: module.ADAPTER
    for module in (cub, cub100, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397, image_folder)
}
NAMES: tuple[str, ...] = tuple(_ADAPTERS)


def read(
    root: Path,
    dataset: str | None = None,
    *,
    partition: int = 1,
    skip_missing: bool = False,
    report: Report | None = None,
) -> DataSet:
    """Read, check, and set a fifth of each class aside for validation where the data set does not.

    Args:
        root: the data set's folder, or its parent as torchvision's `root`.
        dataset: one of `NAMES`; None recognises it by its files and takes any other folder for an ImageFolder.
        partition: which of the official ones, from 1, where a data set has several.
        skip_missing: leave listed pictures that are not there out, with a warning, instead of refusing the data set.
        report: called while the pictures' headers are looked at, which takes minutes on a network drive.

    Raises:
        UsageError: one line with everything that is wrong and what to do.
    """
    if dataset is not None and dataset not in _ADAPTERS:
        raise UsageError(f"no data set is called {dataset!r}; choose one of {', '.join(NAMES)}")
    try:
        return _read(root, dataset, partition, skip_missing, report)
    except OSError as error:
        raise cannot_be_read(error, root) from None


def _read(root: Path, dataset: str | None, partition: int, skip_missing: bool, report: Report | None) -> DataSet:
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder; give a data set's folder or one with a folder per class")
    adapter, folder = _recognised(root) if dataset is None else _located(root, _ADAPTERS[dataset])
    _check_partition(adapter, partition)
    data = checks.usable(adapter.read(folder, partition), skip_missing=skip_missing, report=report)
    if not data.val:
        train, val = stratified_split([sample.label for sample in data.train], data.class_names, root=data.root)
        data = replace(data, train=[data.train[i] for i in train], val=[data.train[i] for i in val])
    # last, because a pair within train/ may now lie on both sides
    return replace(data, warnings=[*data.warnings, *duplicates.warnings(data)])


def _recognised(root: Path) -> tuple[Adapter, Path]:
    found = [(adapter, root) for adapter in _ADAPTERS.values() if adapter.recognises(root)]
    if not found:
        for adapter in _ADAPTERS.values():
            folders = [folder for folder in _below(root, adapter) if adapter.recognises(folder)]
            found += [(adapter, folder) for folder in folders[:1]]
    if len(found) > 1:
        names = ", ".join(f"{adapter.name} in {folder}" for adapter, folder in found)
        raise UsageError(f"{root}: it holds several data sets ({names}); choose one with --dataset, or give its folder")
    return found[0] if found else (_ADAPTERS["imagefolder"], root)


def _located(root: Path, adapter: Adapter) -> tuple[Adapter, Path]:
    """Where the data set lies: in `root` or below it; where it is not recognised, the likeliest place to report on."""
    below = _below(root, adapter)
    recognised = [folder for folder in (root, *below) if adapter.recognises(folder)]
    return adapter, (recognised or below or [root])[0]


def _below(root: Path, adapter: Adapter) -> list[Path]:
    return [root / name for name in adapter.folders if (root / name).is_dir()]


def _check_partition(adapter: Adapter, partition: int) -> None:
    if not adapter.partitions and partition != 1:
        several = ", ".join(a.name for a in _ADAPTERS.values() if a.partitions)
        raise UsageError(
            f"{adapter.title} has no partition {partition}, it has a single split; only {several} have --partition"
        )
    if adapter.partitions and not 1 <= partition <= adapter.partitions:
        raise UsageError(f"{adapter.title} has the partitions 1 to {adapter.partitions}, {partition} is none of them")
