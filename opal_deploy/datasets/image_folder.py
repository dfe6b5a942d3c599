"""ImageFolder: one folder per class; and Caltech-101, whose class folders are its only lists.

    DATA/<class>/**/*.jpg                 or
    DATA/train/<class>/**/*.jpg           with or without DATA/val (or valid, validation) and DATA/test

Classes are sorted by name. Hidden files and folders are skipped, links are followed, and files that look like images
but are not used get a warning.

    101_ObjectCategories/<class>/image_<nnnn>.jpg       Caltech-101, numbered from 0001

Caltech-101 has NO official split, and published results differ in theirs. Here a stratified fifth of each class is the
test split: scikit-learn's StratifiedShuffleSplit(test_size=0.2, random_state=42) over all images, classes sorted by
name as torchvision sorts them, BACKGROUND_Google left out. A warning says so, because accuracies measured on this split
cannot be compared with any others. torchvision.datasets.Caltech101 counts the files of a folder, so that one stray or
missing file makes it name images that do not exist; here a gap in the numbers is a missing image.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from opal_deploy.datasets.listing import (
    Adapter,
    LabeledPath,
    Listing,
    build_listing,
    has_files,
    missing_files,
    require_files,
)
from opal_deploy.datasets.samples import (
    SPLIT_FRACTION,
    SPLIT_SEED,
    DataSet,
    Sample,
    classes_without_samples,
    display_path,
    pluralize,
    shorten_list,
    stratified_split,
)
from opal_deploy.errors import UsageError

EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2")
)
# images in formats that are not read
_OTHER_EXTENSIONS = frozenset((".heic", ".heif", ".jxl", ".raw", ".cr2", ".nef", ".dng", ".psd", ".svg"))
_SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}

_CALTECH101 = "Caltech-101"
_CALTECH101_CLASSES = "101_ObjectCategories"
_CALTECH101_BACKGROUND = "BACKGROUND_Google"
_IMAGE_NAME = re.compile(r"image_(\d{4})\.jpg")


def _read_image_folder(root: Path) -> Listing:
    """List the images; `val` is empty where the data set has no such folder.

    Raises:
        UsageError: split folders without train/, or two validation folders.
    """
    splits = {split: folder for split, names in _SPLIT_FOLDERS.items() if (folder := _find_split_folder(root, names))}
    if splits and "train" not in splits:
        raise UsageError(
            f"{root}: found {', '.join(f'{folder.name}/' for folder in splits.values())} but no train/ with a folder "
            "per class; add train/, or give a folder whose subfolders are the classes"
        )
    train_root = splits.get("train", root)
    class_names = [folder.name for folder in subfolders(train_root)]
    problems: list[str] = []
    warnings: list[str] = []
    search = ImageSearch(root)
    for folder in (root, *splits.values()):
        search.note_stray_files(folder)
    if not class_names and search.stray:
        raise UsageError(
            f"{root}: found {pluralize(len(search.stray), 'image', 'images')} and no folder per class; expected "
            f"{root}/<class>/*.jpg: move each class's images into a folder of its name"
        )
    if splits and (unused := [f.name for f in subfolders(root) if f not in splits.values()]):
        warnings.append(f"skipped folders next to train/: {shorten_list(unused)}")
    train = _list_samples(search, train_root, class_names)
    others: dict[str, list[Sample]] = {"val": [], "test": []}
    for split, folder in splits.items():
        if split == "train":
            continue
        if unknown := [f.name for f in subfolders(folder) if f.name not in class_names]:
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
        advice="expected DATA/<class>/*.jpg or DATA/train/<class>/*.jpg, with images in each folder",
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
    """Finds image files and remembers the files that are not used.

    Args:
        root: the data set's folder; messages name files relative to it.

    Attributes:
        stray: images that lie outside any class.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.stray: list[Path] = []
        self._unsupported: list[Path] = []
        self._broken_links: list[Path] = []
        self._unreadable: list[str] = []

    def find_images(self, folder: Path) -> list[Path]:
        """Return the image files below a folder, told by their extensions, sorted, without hidden ones.

        Broken links are among them: checking the files finds them missing.
        """
        images = []
        for path in self._walk_files(folder):
            if path.suffix.lower() in EXTENSIONS:
                images.append(path)
            elif path.suffix.lower() in _OTHER_EXTENSIONS:
                self._unsupported.append(path)
        return sorted(images)

    def note_stray_files(self, folder: Path) -> None:
        """Remember the images that lie in a folder of class folders, outside any class, and its broken links."""
        files = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
        self.stray += [path for path in files if path.suffix.lower() in EXTENSIONS | _OTHER_EXTENSIONS]
        # any other broken link may have been a whole class
        others = (path for path in files if path not in self.stray)
        self._broken_links += [path for path in others if path.is_symlink() and not path.exists()]

    def problems(self) -> list[str]:
        """Return a problem if some folders could not be read."""
        if not self._unreadable:
            return []
        folders = pluralize(len(self._unreadable), "folder", "folders")
        return [f"{folders} cannot be read: {shorten_list(self._unreadable)}"]

    def warnings(self) -> list[str]:
        """Return a line for each kind of unused file that looks like an image."""
        lines = {
            ("image outside the class folders", "images outside the class folders"): self.stray,
            ("image in an unsupported format", "images in unsupported formats"): self._unsupported,
            ("broken link next to the class folders", "broken links next to the class folders"): self._broken_links,
        }
        return [
            f"skipped {pluralize(len(paths), *words)}: "
            f"{shorten_list([display_path(path, self._root) for path in sorted(paths)])}"
            for words, paths in lines.items()
            if paths
        ]

    def _walk_files(self, folder: Path) -> Iterator[Path]:
        # a link to a folder that was visited, or is being visited, would lead in circles
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


# never recognized: the registry falls back to it for every folder that no adapter recognizes
IMAGE_FOLDER = Adapter("imagefolder", "an ImageFolder", lambda folder: False, _read_image_folder)


def _is_caltech101(folder: Path) -> bool:
    return has_files(folder, f"{_CALTECH101_CLASSES}/")


def _read_caltech101(folder: Path) -> Listing:
    """Read the class folders and split their images.

    Raises:
        UsageError: no class folders, or too few images to split.
    """
    require_files(
        folder,
        _CALTECH101,
        missing_files(folder, [f"{_CALTECH101_CLASSES}/"]),
        f"unpack {_CALTECH101_CLASSES}.tar.gz there",
    )
    classes = [
        subfolder for subfolder in subfolders(folder / _CALTECH101_CLASSES) if subfolder.name != _CALTECH101_BACKGROUND
    ]
    class_names = [subfolder.name for subfolder in classes]
    pairs: list[LabeledPath] = []
    for label, subfolder in enumerate(classes):
        numbers = [int(match[1]) for path in subfolder.iterdir() if (match := _IMAGE_NAME.fullmatch(path.name))]
        pairs += [(subfolder / f"image_{number:04}.jpg", label) for number in range(1, max(numbers, default=0) + 1)]
    if len(classes) < 2:
        raise UsageError(
            f"{folder}: {pluralize(len(classes), 'class folder', 'class folders')} in {_CALTECH101_CLASSES}/, "
            "at least 2 are needed; unpack it again"
        )
    train, test = stratified_split(
        [label for _, label in pairs], class_names, root=folder, part="test", advice="unpack the official archive again"
    )
    return build_listing(
        "caltech101",
        folder,
        class_names,
        {"train": [pairs[i] for i in train], "test": [pairs[i] for i in test]},
        warnings=[
            f"{_CALTECH101} has no official split: the test split is a stratified {SPLIT_FRACTION:.0%} of each class "
            f"(seed {SPLIT_SEED}); results cannot be compared with published ones"
        ],
        image_folders=tuple(classes),
    )


_FOLDERS = ("caltech101", "caltech-101", "Caltech101")
CALTECH101 = Adapter("caltech101", _CALTECH101, _is_caltech101, _read_caltech101, _FOLDERS)
