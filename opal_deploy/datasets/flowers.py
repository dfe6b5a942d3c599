"""Oxford Flowers-102: 102 species, whole pictures, the official training, validation and test pictures.

    jpg/image_00001.jpg ... jpg/image_08189.jpg
    setid.mat, imagelabels.mat

torchvision.datasets.Flowers102 reads the lists and refuses any but the official ones, by their checksums. Class names
are torchvision's, in the order of the labels 1 ... 102; the archive itself has none.
"""

from __future__ import annotations

from pathlib import Path

from opal_deploy.datasets.listing import Adapter, Listing, from_pairs, lacking, require_files
from opal_deploy.datasets.torchvision_lists import through_torchvision

_TITLE = "Oxford Flowers-102"
_FILES = ("jpg/", "setid.mat", "imagelabels.mat")


def is_flowers(folder: Path) -> bool:
    """Whether it has at least two of the three: pictures and a list, or both lists."""
    return len(lacking(folder, _FILES)) < 2


def read(folder: Path) -> Listing:
    """The lists' content.

    Raises:
        UsageError: files that are absent, damaged or not the official ones.
    """
    require_files(folder, _TITLE, lacking(folder, _FILES), "put 102flowers.tgz's jpg/ and the two .mat files there")
    lists = through_torchvision(
        folder,
        "Flowers102",
        {f"flowers-102/{name.rstrip('/')}": folder / name for name in _FILES},
        {split: {"split": split} for split in ("train", "val", "test")},
    )
    splits = {split: found.pairs for split, found in lists.items()}
    return from_pairs("flowers", folder, lists["train"].classes, splits, pictures=(folder / "jpg",))


_FOLDERS = ("flowers-102", "flowers102", "flowers")

ADAPTER = Adapter("flowers", _TITLE, is_flowers, lambda folder, _: read(folder), _FOLDERS)
