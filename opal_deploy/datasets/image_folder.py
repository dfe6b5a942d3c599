"""ImageFolder: one folder a class.

    DATA/<class>/**/*.jpg                 or
    DATA/train/<class>/**/*.jpg           with or without DATA/val (or valid, validation) and DATA/test

Classes are sorted by name. Hidden files and folders do not count; links are followed. What looks like a picture and is
not used is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from opal_deploy.datasets.listing import Adapter, Listing
from opal_deploy.datasets.samples import DataSet, Sample, classes_without, counted, listed, shown
from opal_deploy.errors import UsageError

EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2")
)
# pictures too, of kinds that are not read
_OTHER_EXTENSIONS = frozenset((".heic", ".heif", ".jxl", ".raw", ".cr2", ".nef", ".dng", ".psd", ".svg"))
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
    search = Search(root)
    search.stray(root)
    for folder in splits.values():
        search.stray(folder)
    if splits:
        stray = [f.name for f in subfolders(root) if f not in splits.values()]
        if stray:
            warnings.append(f"beside train/, these folders were passed over: {listed(stray)}")
    train = _samples(search, train_root, class_names)
    others: dict[str, list[Sample]] = {"val": [], "test": []}
    for split, folder in splits.items():
        if split == "train":
            continue
        unknown = [f.name for f in subfolders(folder) if f.name not in class_names]
        if unknown:
            problems.append(f"classes in {folder.name}/ that train/ does not have: {listed(unknown)}")
        others[split] = _samples(search, folder, class_names)
        if not others[split]:
            problems.append(f"no pictures in {folder.name}/")
        elif absent := classes_without(others[split], class_names):
            warnings.append(f"classes without pictures in {folder.name}/: {listed(absent)}")
    problems += search.problems()
    warnings += search.warnings()
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


def _samples(search: Search, folder: Path, class_names: list[str]) -> list[Sample]:
    return [
        Sample(path, label)
        for label, name in enumerate(class_names)
        if (folder / name).is_dir()
        for path in search.pictures(folder / name)
    ]


class Search:
    """Finds pictures and keeps account of what is passed over.

    Args:
        root: the data set's folder, which names are relative to.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stray: list[Path] = []
        self._other: list[Path] = []
        self._broken: list[Path] = []
        self._unreadable: list[str] = []

    def pictures(self, folder: Path) -> list[Path]:
        """Files in a folder, at any depth, that are called like pictures, by path; hidden ones do not count.

        A link that leads nowhere is among them: whoever looks at the files finds it missing.
        """
        found = []
        for path in self._files(folder):
            if path.suffix.lower() in EXTENSIONS:
                found.append(path)
            elif path.suffix.lower() in _OTHER_EXTENSIONS:
                self._other.append(path)
        return sorted(found)

    def stray(self, folder: Path) -> None:
        """Take note of the pictures in a folder of class folders: nothing says what they show."""
        found = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
        self._stray += [path for path in found if path.suffix.lower() in EXTENSIONS | _OTHER_EXTENSIONS]
        # others might be whole classes
        others = (path for path in found if path not in self._stray)
        self._broken += [path for path in others if path.is_symlink() and not path.exists()]

    def problems(self) -> list[str]:
        """Folders that could not be looked into."""
        if not self._unreadable:
            return []
        return [f"{counted(len(self._unreadable), 'folder', 'folders')} cannot be read: {listed(self._unreadable)}"]

    def warnings(self) -> list[str]:
        """What looks like a picture and is not used, a line each kind."""
        lines = {
            ("picture lies in no class folder and is", "pictures lie in no class folder and are"): self._stray,
            ("file has an ending that is not read and is", "files have endings that are not read and are"): self._other,
            (
                "link beside the class folders leads nowhere and is",
                "links beside the class folders lead nowhere and are",
            ): self._broken,
        }
        return [
            f"{counted(len(paths), *words)} not used: {listed([shown(path, self._root) for path in sorted(paths)])}"
            for words, paths in lines.items()
            if paths
        ]

    def _files(self, folder: Path) -> Iterator[Path]:
        # a link to a folder that is being looked through, or was, would lead round in circles
        start = Path(os.path.realpath(folder))
        seen = {start, *start.parents}
        for parent, below, names in os.walk(folder, followlinks=True, onerror=self._note):
            entered = []
            for name in sorted(name for name in below if not name.startswith(".")):
                real = Path(os.path.realpath(os.path.join(parent, name)))
                if real not in seen:
                    seen.add(real)
                    entered.append(name)
            below[:] = entered
            yield from (Path(parent, name) for name in names if not name.startswith("."))

    def _note(self, error: OSError) -> None:
        self._unreadable.append(f"{shown(Path(os.fsdecode(error.filename)), self._root)} ({error.strerror})")


# never recognised: it is what every folder is that no other adapter knows
ADAPTER = Adapter("imagefolder", "an ImageFolder", lambda _: False, lambda folder, _: read(folder))
