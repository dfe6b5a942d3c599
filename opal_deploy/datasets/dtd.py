"""Describable Textures (DTD r1.0.1): 47 textures, whole pictures, ten official partitions.

    images/<texture>/*.jpg
    labels/train<p>.txt, labels/val<p>.txt, labels/test<p>.txt      p = 1 ... 10

torchvision.datasets.DTD reads the lists. Every partition has 40 pictures of each texture in each of its three splits.
"""

from __future__ import annotations

from pathlib import Path

from opal_deploy.datasets.listing import Adapter, Listing, from_pairs, has, lacking, require_files
from opal_deploy.datasets.torchvision_lists import through_torchvision
from opal_deploy.errors import UsageError

_TITLE = "Describable Textures"
_SPLITS = ("train", "val", "test")


def is_dtd(folder: Path) -> bool:
    """Whether it has images/ and the first partition's lists."""
    return has(folder, "images/", *(f"labels/{split}1.txt" for split in _SPLITS))


def read(folder: Path, partition: int = 1) -> Listing:
    """The lists of a partition.

    Args:
        partition: 1 ... 10.

    Raises:
        UsageError: files that are absent or damaged, or splits of different classes.
    """
    files = ("images/", *(f"labels/{split}{partition}.txt" for split in _SPLITS))
    require_files(folder, _TITLE, lacking(folder, files))
    lists = through_torchvision(
        folder,
        "DTD",
        {f"dtd/dtd/{name}": folder / name for name in ("images", "labels")},
        {split: {"split": split, "partition": partition} for split in _SPLITS},
    )
    # torchvision numbers the names that it meets, in each split anew
    class_names = lists["train"].classes
    if other := [split for split in _SPLITS if lists[split].classes != class_names]:
        raise UsageError(
            f"{folder}: other textures than in labels/train{partition}.txt are in "
            f"{' and '.join(f'labels/{split}{partition}.txt' for split in other)}; "
            "unpack the official archive again"
        )
    splits = {split: found.pairs for split, found in lists.items()}
    return from_pairs("dtd", folder, class_names, splits, pictures=(folder / "images",))


# torchvision's root holds dtd/, which holds the archive's own dtd/
ADAPTER = Adapter("dtd", _TITLE, is_dtd, read, ("dtd/dtd", "dtd"), partitions=10)
