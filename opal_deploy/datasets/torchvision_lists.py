"""Official lists, read by those who know them: torchvision's data set classes and SciPy's reader of Matlab files.

torchvision wants fixed folder names. A temporary folder of symbolic links gives it those, whatever the user's folder is
called and wherever it lies; nothing is downloaded, and no picture is opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from opal_deploy.datasets.listing import Pair, all_of
from opal_deploy.errors import UsageError, require


@dataclass(frozen=True)
class Lists:
    """One split as torchvision reads it.

    Attributes:
        pairs: the user's files with their class indices.
        classes: names in the order of the indices.
    """

    pairs: list[Pair]
    classes: list[str]


def through_torchvision(
    folder: Path, class_name: str, links: Mapping[str, Path], splits: Mapping[str, Mapping[str, Any]]
) -> dict[str, Lists]:
    """Let torchvision read the lists of a data set.

    Args:
        folder: the data set's, for errors.
        class_name: of a class in torchvision.datasets.
        links: path under torchvision's root to the user's file or folder.
        splits: split to the class's other arguments.

    Raises:
        UsageError: torchvision cannot read them; one with all splits.
    """
    for package in ("torchvision", "scipy"):
        require(package, "train", f"reading {folder}")
    import torchvision.datasets

    build = getattr(torchvision.datasets, class_name)
    with tempfile.TemporaryDirectory(prefix="opal-deploy-") as staging:
        root = Path(staging)
        for name, target in links.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(target.resolve())

        def named(message: str) -> str:
            # the temporary folder is gone by the time that a person looks for it
            for name, target in links.items():
                message = message.replace(str(root / name), str(target))
            return message

        def read(split: str) -> Lists:
            try:
                dataset = build(str(root), **splits[split])
                pairs = [(_original(path, root, links), label) for path, label in _pairs(dataset)]
                return Lists(pairs, [str(name) for name in dataset.classes])
            except Exception as error:  # torchvision and SciPy raise nearly anything for a list that is not in order
                raise UsageError(
                    f"{folder}: its lists for {split} are damaged or not the official ones ({named(_brief(error))}); "
                    "unpack the official archives again"
                ) from None

        return all_of({split: partial(read, split) for split in splits})


def load_matlab(path: Path) -> dict[str, Any]:
    """The variables of a Matlab file, with dimensions of one left out.

    Raises:
        UsageError: not such a file.
    """
    require("scipy", "train", f"reading {path}")
    from scipy.io import loadmat

    try:
        variables: dict[str, Any] = loadmat(path, squeeze_me=True)
    except Exception as error:  # SciPy's reader raises nearly anything for a damaged file
        raise UsageError(
            f"{path}: not a readable Matlab file ({_brief(error)}); unpack the official archive again"
        ) from None
    return variables


def _pairs(dataset: Any) -> list[Pair]:
    """Files and labels, which torchvision keeps under three private names."""
    if hasattr(dataset, "_samples"):
        return [(Path(path), int(label)) for path, label in dataset._samples]
    files = dataset._image_files if hasattr(dataset, "_image_files") else dataset._images
    return [(Path(path), int(label)) for path, label in zip(files, dataset._labels, strict=True)]


def _original(path: Path, root: Path, links: Mapping[str, Path]) -> Path:
    name = next(name for name in links if path.is_relative_to(root / name))
    return links[name] / path.relative_to(root / name)


def _brief(error: Exception) -> str:
    # torchvision ends by advising download=True, which nobody here can follow
    text = " ".join(str(error).split()).split(" You can use download")[0]
    return f"{type(error).__name__}: {text}" if not isinstance(error, RuntimeError) else text.rstrip(".")
