"""A data set in memory: images with labels, in three splits. Plain data; no image is opened here.

Where a data set has no official validation images, a fifth of each class is set aside as the paper's authors do it:
scikit-learn's StratifiedShuffleSplit(test_size=0.2, random_state=42) over torchvision's ImageFolder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from opal_deploy.errors import UsageError, require
from opal_deploy.preprocess.geometry import Box

Crop = Literal["boxes"]

# names listed in an error or a warning; the rest is counted
MAX_LISTED = 20


@dataclass(frozen=True)
class Sample:
    """One labelled image.

    Attributes:
        path: the image file.
        label: class index, 0 ... C-1.
        box: (x0, y0, x1, y1) in pixels of the oriented image, its crop; None for the whole image.
        object_box: the box of the object in an image that is not cropped to it, if known.
    """

    path: Path
    label: int
    box: Box | None = None
    object_box: Box | None = None


@dataclass(frozen=True)
class DataSet:
    """A labelled data set.

    Attributes:
        root: the folder that the data set was read from.
        layout: the name of the adapter (`cub`, `pets`, ...); any text for a data set made in code.
        class_names: C names in the order of the labels.
        train, val, test: the splits; `test` may be empty.
        crop: `boxes` where samples carry boxes, else None.
        warnings: one line for each kind of tolerated problem.
        skipped: images left out because they are missing or their headers cannot be read.
    """

    root: Path
    layout: str
    class_names: list[str]
    train: list[Sample]
    val: list[Sample]
    test: list[Sample]
    crop: Crop | None = None
    warnings: list[str] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return len(self.class_names)

    def select(self, split: str) -> list[Sample]:
        """Return the images of `train`, `val` or `test`, or of all three for `all`."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return [*self.train, *self.val, *self.test] if split == "all" else splits[split]

    def without_crops(self) -> DataSet:
        """Return the data set with whole images; their boxes then say where the objects are."""
        train, val, test = (
            [replace(sample, box=None, object_box=sample.box) for sample in split]
            for split in (self.train, self.val, self.test)
        )
        return replace(self, crop=None, train=train, val=val, test=test)

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
        return {
            "root": self.root.resolve().name,
            "layout": self.layout,
            "classes": self.num_classes,
            "train": len(self.train),
            "val": len(self.val),
            "test": len(self.test),
            "crop": self.crop,
            "skipped": len(self.skipped),
        }


IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2")
)
# the share of the second part of a stratified split, and the seed of its shuffle
SPLIT_FRACTION, SPLIT_SEED = 0.2, 42


def split_off_validation(data: DataSet) -> DataSet:
    """Return the data set with a fifth of each class's training images as validation images, see `stratified_split`."""
    order, ranks = image_folder_order(data.train, data.class_names)
    names = [name for _, name in sorted(zip(ranks, data.class_names, strict=True))]
    first, second = stratified_split([ranks[data.train[i].label] for i in order], names, root=data.root)
    train, val = ([data.train[i] for i in sorted(order[j] for j in part)] for part in (first, second))
    return replace(data, train=train, val=val)


def image_folder_order(samples: list[Sample], class_names: list[str]) -> tuple[list[int], list[int]]:
    """Return the order of samples and classes in torchvision's ImageFolder, one folder per class.

    Returns positions in `samples`, by class folder, then by path; and for each label the position of its class folder.
    A class's folder is the one that holds exactly its images, or else one with the class's name.
    """
    folders: list[set[str]] = [set() for _ in class_names]
    for sample in samples:
        folders[sample.label].add(str(sample.path.parent))
    alone = all(len(own) <= 1 for own in folders) and len(set().union(*folders)) == sum(map(len, folders))
    keys = [min(own, default="") if alone else name for own, name in zip(folders, class_names, strict=True)]
    labels = sorted(range(len(keys)), key=keys.__getitem__)
    ranks = sorted(range(len(keys)), key=labels.__getitem__)
    # torchvision walks a class's folders one after the other
    paths = [(ranks[sample.label], str(sample.path.parent), sample.path.name) for sample in samples]
    return sorted(range(len(samples)), key=paths.__getitem__), ranks


def stratified_split(
    labels: list[int],
    class_names: list[str],
    *,
    root: Path,
    part: str = "validation",
    advice: str = "add images, or give a val/ folder next to train/",
) -> tuple[list[int], list[int]]:
    """Return positions in `labels` of a first and a second part, each ascending; depends on the order of images.

    Raises:
        UsageError: a class has a single image, or the second part would have fewer images than classes. The message
            names `root`, the `part` and the `advice`.
    """
    require("sklearn", "train", "a data set without an official split", pip_name="scikit-learn")
    from sklearn.model_selection import StratifiedShuffleSplit

    counts = Counter(labels)
    if singles := [name for label, name in enumerate(class_names) if counts[label] == 1]:
        raise UsageError(
            f"{root}: no {part} split possible, classes with a single image: {shorten_list(singles)}; {advice}"
        )
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=SPLIT_FRACTION, random_state=SPLIT_SEED)
    try:
        first, second = next(splitter.split(labels, labels))
    except ValueError as error:
        raise UsageError(
            f"{root}: no {part} split possible, {pluralize(len(labels), 'image is', 'images are')} too few for "
            f"{pluralize(len(class_names), 'class', 'classes')} ({error}); {advice}"
        ) from None
    return sorted(int(i) for i in first), sorted(int(i) for i in second)


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
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def describe_never_predicted(images: Mapping[str, int], predicted: Collection[str]) -> str:
    """Return a line on the classes with `images` (their number by class) that were never `predicted`, or nothing."""
    never = [f"{name} ({pluralize(n, 'image', 'images')})" for name, n in images.items() if n and name not in predicted]
    return f"Never predicted: {shorten_list(never)}" if never else ""


def list_images(folder: Path) -> list[Path]:
    """Return the files below a folder with an image format's suffix, sorted; UsageError for a missing folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of images")
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
