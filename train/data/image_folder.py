"""ImageFolder: one folder a class.

    DATA/<class>/**/*.jpg                 or
    DATA/train/<class>/**/*.jpg           with or without DATA/val (or valid, validation) and DATA/test

Classes are sorted by name. Hidden files and folders do not count.
"""

from __future__ import annotations

from pathlib import Path

from opal_deploy.errors import UsageError
from opal_deploy.train.data.listing import Adapter, Listing
from opal_deploy.train.data.samples import DataSet, Sample, classes_without, listed

EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2")
)
_VAL_NAMES = ("val", "valid", "validation")


def read(root: Path) -> Listing:
    """List the pictures; `val` is empty where the data set has no such folder.

    Raises:
        UsageError: split folders without train/, or two for validation.
    """
    splits = {split: folder for split, names in _SPLITS.items() if (folder := _split_folder(root, names))}
    if splits and "train" not in splits:
        raise UsageError(
            f"{root}: it has {', '.join(f'{folder.name}/' for folder in splits.values())} but no train/ with a folder "
            "per class; add train/, or give a folder whose subfolders are the classes"
        )
    train_root = splits.get("train", root)
    class_names = [folder.name for folder in subfolders(train_root)]
    problems: list[str] = []
    warnings: list[str] = []
    if len(class_names) < 2:
        problems.append(f"{len(class_names)} class folder(s) in {train_root}, at least 2 are needed")
    if splits:
        stray = [f.name for f in subfolders(root) if f not in splits.values()]
        if stray:
            warnings.append(f"beside train/, these folders were passed over: {listed(stray)}")
    train = _samples(train_root, class_names)
    others: dict[str, list[Sample]] = {"val": [], "test": []}
    for split, folder in splits.items():
        if split == "train":
            continue
        unknown = [f.name for f in subfolders(folder) if f.name not in class_names]
        if unknown:
            problems.append(f"classes in {folder.name}/ that train/ does not have: {listed(unknown)}")
        others[split] = _samples(folder, class_names)
        if not others[split]:
            problems.append(f"no pictures in {folder.name}/")
        elif absent := classes_without(others[split], class_names):
            warnings.append(f"classes without pictures in {folder.name}/: {listed(absent)}")
    data = DataSet(root, "imagefolder", class_names, train, others["val"], others["test"], warnings=warnings)
    return Listing(
        data,
        problems,
        advice="expected DATA/<class>/*.jpg or DATA/train/<class>/*.jpg, remove or fill the folders named",
    )


_SPLITS = {"train": ("train",), "val": _VAL_NAMES, "test": ("test",)}


def _split_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    """A folder of class folders; one that holds pictures itself is a class of that name (trains, say)."""
    found = [root / name for name in names if (root / name).is_dir() and subfolders(root / name)]
    if len(found) > 1:
        raise UsageError(f"{root}: {' and '.join(f.name + '/' for f in found)} both look like validation; keep one")
    return found[0] if found else None


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, by name; hidden ones do not count."""
    return sorted((p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name)


def _samples(folder: Path, class_names: list[str]) -> list[Sample]:
    return [
        Sample(path, label)
        for label, name in enumerate(class_names)
        if (folder / name).is_dir()
        for path in pictures(folder / name)
    ]


def pictures(folder: Path) -> list[Path]:
    """Files in a folder, at any depth, that are called like pictures, by path; hidden ones do not count."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )


# never recognised: it is what every folder is that no other adapter knows
ADAPTER = Adapter("imagefolder", "an ImageFolder", lambda _: False, lambda folder, _: read(folder))
