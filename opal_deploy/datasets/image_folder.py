"""ImageFolder: one folder per class.

    DATA/<class>/**/*.jpg                 or
    DATA/train/<class>/**/*.jpg           with or without DATA/val (or valid, validation) and DATA/test

Classes are sorted by name. Hidden files and folders are skipped, links are followed, and files that look like images
but are not used are warned of.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from opal_deploy.datasets.listing import Adapter, Listing
from opal_deploy.datasets.samples import (
    DataSet,
    Sample,
    classes_without_samples,
    display_path,
    pluralize,
    shorten_list,
)
from opal_deploy.errors import UsageError

EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2")
)
# images in formats that are not read
_OTHER_EXTENSIONS = frozenset((".heic", ".heif", ".jxl", ".raw", ".cr2", ".nef", ".dng", ".psd", ".svg"))
_SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def _read_image_folder(root: Path) -> Listing:
    """List the images; `val` is empty where the data set has no such folder.

    Raises:
        UsageError: split folders without train/, or two validation folders.
    """
    splits = {split: folder for split, names in _SPLIT_FOLDERS.items() if (folder := _find_split_folder(root, names))}
    if splits and "train" not in splits:
        raise UsageError(
            f"{root}: it has {', '.join(f'{folder.name}/' for folder in splits.values())} but no train/ with a folder "
            "per class; add train/, or give a folder whose subfolders are the classes"
        )
    train_root = splits.get("train", root)
    class_names = [folder.name for folder in subfolders(train_root)]
    problems: list[str] = []
    warnings: list[str] = []
    search = ImageSearch(root)
    search.note_stray_files(root)
    for folder in splits.values():
        search.note_stray_files(folder)
    if splits:
        unused = [f.name for f in subfolders(root) if f not in splits.values()]
        if unused:
            warnings.append(f"beside train/, these folders were passed over: {shorten_list(unused)}")
    train = _list_samples(search, train_root, class_names)
    others: dict[str, list[Sample]] = {"val": [], "test": []}
    for split, folder in splits.items():
        if split == "train":
            continue
        unknown = [f.name for f in subfolders(folder) if f.name not in class_names]
        if unknown:
            problems.append(f"classes in {folder.name}/ that train/ does not have: {shorten_list(unknown)}")
        others[split] = _list_samples(search, folder, class_names)
        if not others[split]:
            problems.append(f"no images in {folder.name}/")
        elif empty := classes_without_samples(others[split], class_names):
            warnings.append(f"classes without images in {folder.name}/: {shorten_list(empty)}")
    problems += search.problems()
    warnings += search.warnings()
    return Listing(
        DataSet(root, "imagefolder", class_names, train, others["val"], others["test"], warnings=warnings),
        problems,
        advice="expected DATA/<class>/*.jpg or DATA/train/<class>/*.jpg, remove or fill the folders named",
    )


def _find_split_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    """Return the folder of class folders; a folder that holds images itself is a class of that name (trains, say)."""
    folders = [root / name for name in names if (root / name).is_dir() and subfolders(root / name)]
    if len(folders) > 1:
        raise UsageError(f"{root}: {' and '.join(f.name + '/' for f in folders)} both look like validation; keep one")
    return folders[0] if folders else None


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden ones."""
    return sorted((p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name)


def _list_samples(search: ImageSearch, folder: Path, class_names: list[str]) -> list[Sample]:
    return [
        Sample(path, label)
        for label, name in enumerate(class_names)
        if (folder / name).is_dir()
        for path in search.find_images(folder / name)
    ]


class ImageSearch:
    """Finds image files and keeps account of what is not used.

    Args:
        root: the data set's folder; messages name files relative to it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stray: list[Path] = []
        self._unsupported: list[Path] = []
        self._broken_links: list[Path] = []
        self._unreadable: list[str] = []

    def find_images(self, folder: Path) -> list[Path]:
        """Return the files below a folder with an image's extension, sorted, without hidden ones.

        A link that leads nowhere is among them: checking the files finds it missing.
        """
        images = []
        for path in self._walk_files(folder):
            if path.suffix.lower() in EXTENSIONS:
                images.append(path)
            elif path.suffix.lower() in _OTHER_EXTENSIONS:
                self._unsupported.append(path)
        return sorted(images)

    def note_stray_files(self, folder: Path) -> None:
        """Remember the images that lie in a folder of class folders, so in no class, and its broken links."""
        files = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
        self._stray += [path for path in files if path.suffix.lower() in EXTENSIONS | _OTHER_EXTENSIONS]
        # any other broken link may have been a whole class
        others = (path for path in files if path not in self._stray)
        self._broken_links += [path for path in others if path.is_symlink() and not path.exists()]

    def problems(self) -> list[str]:
        """Return a problem if folders could not be read."""
        if not self._unreadable:
            return []
        folders = pluralize(len(self._unreadable), "folder", "folders")
        return [f"{folders} cannot be read: {shorten_list(self._unreadable)}"]

    def warnings(self) -> list[str]:
        """Return a line for each kind of file that looks like an image and is not used."""
        lines = {
            ("image lies in no class folder and is", "images lie in no class folder and are"): self._stray,
            (
                "file has an extension that is not read and is",
                "files have extensions that are not read and are",
            ): self._unsupported,
            (
                "link beside the class folders leads nowhere and is",
                "links beside the class folders lead nowhere and are",
            ): self._broken_links,
        }
        return [
            f"{pluralize(len(paths), *words)} not used: "
            f"{shorten_list([display_path(path, self._root) for path in sorted(paths)])}"
            for words, paths in lines.items()
            if paths
        ]

    def _walk_files(self, folder: Path) -> Iterator[Path]:
        # a link to a folder that was visited, or is being visited, would lead round in circles
        start = Path(os.path.realpath(folder))
        visited = {start, *start.parents}
        for parent, names_below, names in os.walk(folder, followlinks=True, onerror=self._note_unreadable):
            entered = []
            for name in sorted(name for name in names_below if not name.startswith(".")):
                real = Path(os.path.realpath(os.path.join(parent, name)))
                if real not in visited:
                    visited.add(real)
                    entered.append(name)
            names_below[:] = entered
            yield from (Path(parent, name) for name in names if not name.startswith("."))

    def _note_unreadable(self, error: OSError) -> None:
        name = display_path(Path(os.fsdecode(error.filename)), self._root)
        self._unreadable.append(f"{name} ({error.strerror})")


# never recognized: the registry falls back to it for every folder that no other adapter knows
IMAGE_FOLDER = Adapter(
    "imagefolder", "an ImageFolder", lambda folder: False, lambda folder, partition: _read_image_folder(folder)
)
