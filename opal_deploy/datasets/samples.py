"""A data set in memory: images with labels, in three splits.

Plain data; no image is opened here. Where a data set has no official validation images, a fifth of each class is set
aside as the paper's authors do it: scikit-learn's StratifiedShuffleSplit(test_size=0.2, random_state=42) over
torchvision's ImageFolder.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from opal_deploy.artifact import files
from opal_deploy.errors import UsageError, require
from opal_deploy.preprocess.geometry import Box

Crop = Literal["boxes"]

IMAGE_SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2"
))  # fmt: skip
# folders that systems leave next to photographs
_LEFT_BY_SYSTEMS = frozenset(("__MACOSX", "@eaDir"))
# the file that every output folder of `infer` has, and its folder of drawings
_RUN, _OVERLAYS = "run.json", "overlays"
_COLUMNS = {"filename": "image", "file": "image", "path": "image", "class": "label"}
# the share of the second part of a stratified split, and the seed of its shuffle
SPLIT_FRACTION, SPLIT_SEED = 0.2, 42
# file of a training run with paths on this machine, which neither checkpoints nor exports carry
PATHS = "paths.json"
# names listed in an error or a warning; the rest is counted
_MAX_LISTED = 20


@dataclass(frozen=True)
class Sample:
    """One labelled image."""

    path: Path
    label: int  # class index, 0 ... C-1
    box: Box | None = None  # the crop, (x0, y0, x1, y1) in pixels of the oriented image; None for the whole image
    object_box: Box | None = None  # the box of the object in an image that is not cropped to it, if known


@dataclass(frozen=True)
class DataSet:
    """A labelled data set in three splits, of which `val` and `test` may be empty."""

    root: Path  # the folder that the data set was read from
    layout: str  # a name of `registry.DATASET_NAMES`; any text for a data set made in code
    class_names: list[str]  # C names in the order of the labels
    train: list[Sample]
    val: list[Sample]
    test: list[Sample]
    crop: Crop | None = None  # `boxes` where samples carry boxes
    warnings: list[str] = field(default_factory=list)  # one line for each kind of tolerated problem
    skipped: list[Path] = field(default_factory=list)  # images left out because their headers cannot be read
    whole: DataSet | None = None  # the data set before validation images were set aside; None where it has its own
    problems: list[str] = field(default_factory=list)  # faults of its lists, with which `check_dataset` refuses it

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return len(self.class_names)

    def select(self, split: str) -> list[Sample]:
        """Return the images of `train`, `val` or `test`, or of all three for `all`."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return [*self.train, *self.val, *self.test] if split == "all" else splits[split]

    def without(self, paths: Collection[Path]) -> DataSet:
        """Return the data set without the images of some files."""
        train, val, test = ([s for s in split if s.path not in paths] for split in (self.train, self.val, self.test))
        return replace(self, train=train, val=val, test=test)

    def without_crops(self) -> DataSet:
        """Return the data set with whole images; their boxes then say where the objects are."""
        train, val, test = (
            [replace(sample, box=None, object_box=sample.box) for sample in split]
            for split in (self.train, self.val, self.test)
        )
        whole = None if self.whole is None else self.whole.without_crops()
        return replace(self, crop=None, train=train, val=val, test=test, whole=whole)

    def describe(self) -> str:
        """Return a line of text: the folder's layout, and the sizes of the splits."""
        splits = {"training": self.train, "validation": self.val, "test": self.test}
        counts = ", ".join(f"{len(samples):,} {name}" for name, samples in splits.items() if samples)
        return (
            f"{self.layout} from {self.root}: {pluralize(self.num_classes, 'class', 'classes')}, {counts or 'no'} "
            f"images{', cropped to their boxes' if self.crop else ''}"
        )

    def summary(self) -> dict[str, Any]:
        """Return the data set's entry in config.json."""
        sizes = {split: len(self.select(split)) for split in ("train", "val", "test")}
        of_folder = {"root": self.root.resolve().name, "layout": self.layout, "classes": self.num_classes}
        return {**of_folder, **sizes, "crop": self.crop, "skipped": len(self.skipped)}


def build_dataset(
    layout: str, folder: Path, class_names: list[str], splits: Mapping[str, list[Sample]], *, crop: Crop | None = None
) -> DataSet:
    """Return a data set by its lists; labels without a class, which are left out, and paths elsewhere are problems."""
    problems: list[str] = []
    kept: dict[str, list[Sample]] = {"train": [], "val": [], "test": []}
    for split, samples in splits.items():
        kept[split] = [sample for sample in samples if 0 <= sample.label < len(class_names)]
        if len(kept[split]) < len(samples):
            problems.append(f"class ids in the {split} list outside 1 to {len(class_names)}")
        paths = [sample.path for sample in samples]
        if outside := [str(p) for p in paths if not p.is_relative_to(folder) or ".." in p.relative_to(folder).parts]:
            problems.append(f"paths in the {split} list that lead out of the folder: {shorten_list(outside)}")
    return DataSet(folder, layout, class_names, kept["train"], kept["val"], kept["test"], crop, problems=problems)


def is_hidden(*names: str) -> bool:
    """Return whether one of the names of a file and the folders around it is never an image's.

    Such are hidden ones (`.ipynb_checkpoints`, `._a.jpg`), and those of folders that systems leave (`@eaDir`).
    """
    return any((name[:1] == "." and name not in (".", "..")) or name in _LEFT_BY_SYSTEMS for name in names)


def is_skipped(folder: Path) -> bool:
    """Return whether a folder inside another one holds no photographs: it is hidden, or an output of `infer`."""
    is_drawn = folder.name == _OVERLAYS and (folder.parent / _RUN).is_file()
    return is_hidden(folder.name) or is_drawn or (folder / _RUN).is_file()


def read_text(path: Path, advice: str) -> str:
    """Return a UTF-8 list's text without byte order mark; UsageError with `advice` if it cannot be read."""
    try:
        return files.read_text(path)
    except OSError as error:
        raise unreadable_error(error, path, advice) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a readable UTF-8 table ({error}); {advice}") from None


def read_csv(
    shown: str, text: str, *choices: tuple[str, ...]
) -> Iterator[tuple[int, tuple[str, ...], list[str | None]]]:
    """Yield the rows of a CSV file: the line, the first of the `choices` of columns that it has, and their values.

    Columns may have the names of Kaggle's lists (`Image`, `filename`, `class`).

    UsageError: names `shown`; it has none of the choices, or is not CSV.
    """
    expected = " or ".join(map(",".join, choices))
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=files.find_delimiter(text.partition("\n")[0]))
        names = [name.strip().lower() for name in reader.fieldnames or ()]
        header = reader.fieldnames = [_COLUMNS.get(name, name) for name in names]
        columns = next((choice for choice in choices if set(choice) <= set(header)), None)
        if columns is None:
            raise UsageError(f"{shown}: columns {', '.join(header)[:80] or 'none'}; expected {expected}")
        for row in reader:
            yield reader.line_num, columns, [row[column] for column in columns]
    except csv.Error as error:
        raise UsageError(f"{shown}: not a CSV file ({error}); expected {expected}") from None


def unreadable_error(error: OSError, path: Path, advice: str = "make it readable, or move it elsewhere") -> UsageError:
    """Return the operating system's error as one line; `path` is for errors without a file name."""
    return UsageError(f"{os.fsdecode(error.filename or path)}: cannot be read ({error.strerror or error}); {advice}")


def split_off_validation(data: DataSet) -> DataSet:
    """Return the data set with a fifth of each class's training images as validation images, see `stratified_split`."""
    train, val = stratified_split(data)
    lacking = classes_without_samples(val, data.class_names)
    warnings = [f"classes without a validation image: {shorten_list(lacking)}"] if lacking else []
    return replace(data, train=train, val=val, whole=data, warnings=[*data.warnings, *warnings])


def stratified_split(data: DataSet) -> tuple[list[Sample], list[Sample]]:
    """Return four fifths of each class's training images, and the other fifth.

    The split depends on the order of images and classes, which is that of torchvision's ImageFolder: by class folder,
    then by path. A class's folder is the one that holds exactly its images, or else one with the class's name.

    UsageError: a class has a single image, or a fifth would have fewer images than classes.
    """
    require("sklearn", "train", "a data set without an official split", pip_name="scikit-learn")
    from sklearn.model_selection import StratifiedShuffleSplit

    samples, names = data.train, data.class_names
    folders = {(sample.label, str(sample.path.parent)) for sample in samples}
    keys = dict(folders)
    if not len(folders) == len(keys) == len({*keys.values()}):
        keys = dict(enumerate(names))
    ranks = {label: rank for rank, label in enumerate(sorted(keys, key=keys.__getitem__))}
    # torchvision walks a class's folders one after the other
    paths = [(ranks[sample.label], str(sample.path.parent), sample.path.name) for sample in samples]
    order = sorted(range(len(samples)), key=paths.__getitem__)
    labels = [paths[i][0] for i in order]
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=SPLIT_FRACTION, random_state=SPLIT_SEED)
    try:
        parts = next(splitter.split(labels, labels))
    except ValueError as error:
        counts = Counter(sample.label for sample in samples)
        singles = shorten_list([name for label, name in enumerate(names) if counts[label] == 1]) or "none"
        raise UsageError(
            f"{data.root}: no stratified split of {pluralize(len(samples), 'image', 'images')} possible ({error}); "
            f"classes with a single image: {singles}; add images, or give a val/ folder next to train/"
        ) from None
    rest, fifth = ([samples[i] for i in sorted(order[position] for position in part)] for part in parts)
    return rest, fifth


def find_root(training: Mapping[str, Any], model: Path | None = None) -> Path | None:
    """Return the folder of a model's data set; None if it is not on this machine.

    Args:
        training: `training` of a checkpoint or metadata, which keeps the folder's name only.
        model: the model's file, next to which its run's `paths.json` may lie, which keeps the whole path.
    """
    roots: list[Path] = []
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # missing, damaged, or of another type
        roots.append(Path(training["data"]["root"]))
        if model is not None:
            roots.insert(0, Path(files.read_json(model.parent / PATHS)["data"]))
    return next((root for root in roots if root.name == roots[-1].name and os.path.isdir(root)), None)


def classes_without_samples(samples: list[Sample], class_names: list[str]) -> list[str]:
    """Return the names of the classes without a sample."""
    present = {sample.label for sample in samples}
    return [name for label, name in enumerate(class_names) if label not in present]


def display_path(path: Path, root: Path) -> str:
    """Return a path for messages: relative to `root` if it lies below."""
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def pluralize(number: int, singular: str, plural: str) -> str:
    """Return a number with the matching words: "1 image is", "1,200 images are"."""
    return f"{number:,} {singular if number == 1 else plural}"


def shorten_list(names: list[str]) -> str:
    """Return the first names separated by commas, and how many more there are."""
    more = f" and {len(names) - _MAX_LISTED:,} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def describe_never_predicted(images: Mapping[str, int], predicted: Collection[str]) -> str:
    """Return a line on the classes with `images` (their number by class) that were never `predicted`, or nothing."""
    never = [f"{name} ({pluralize(n, 'image', 'images')})" for name, n in images.items() if n and name not in predicted]
    return f"Never predicted: {shorten_list(never)}" if never else ""


def list_images(folder: Path) -> list[Path]:
    """Return the files below a folder with an image format's suffix, sorted; none is hidden or an output of `infer`.

    UsageError: the folder is missing, or it or one below cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of images")

    def refuse(error: OSError) -> None:
        raise unreadable_error(error, folder)

    paths: list[Path] = []
    for parent, inner, names in os.walk(folder, onerror=refuse):
        inner[:] = [name for name in inner if not is_skipped(Path(parent, name))]
        paths += [Path(parent, name) for name in names if not is_hidden(name)]
    return sorted(path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES)
