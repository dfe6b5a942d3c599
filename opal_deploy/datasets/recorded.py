"""The data set that a model was trained on, found again by what its checkpoint or metadata record of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opal_deploy.datasets.registry import list_dataset, read_dataset
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import OpalError


def find_recorded_dataset(
    training: dict[str, Any], class_names: Sequence[str], *, torchvision: bool = True
) -> DataSet | None:
    """Return the data set of a training run where it still lies there with the same classes and numbers of images.

    No image is opened, except where the run left unreadable ones out: then headers tell again which.

    Args:
        training: the run's record: a checkpoint's `training` or metadata's.
        class_names: C names in the order of the logits.
        torchvision: whether data sets that torchvision reads may be read, which imports torch.
    """
    data = training.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("root"), str) or not Path(data["root"]).is_dir():
        return None
    root, layout = Path(data["root"]), str(data.get("layout"))
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
