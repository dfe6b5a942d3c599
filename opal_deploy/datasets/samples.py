"""A data set in memory: images with labels, in three splits. Plain data; no image is opened here.

A data set without an official validation or test split is split by name (`SPLITS`); a name always means the same
images. `authors` is the split of the paper's authors: scikit-learn's
StratifiedShuffleSplit(test_size=0.2, random_state=42).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from opal_deploy.errors import UsageError, require
from opal_deploy.preprocess.geometry import Box

Crop = Literal["boxes"]
# called with the number of images done, the number of all images where known, and a note on what is being done
ProgressCallback = Callable[[int, int | None, str], None]

# names that an error or a warning spells out; the rest is counted
MAX_LISTED = 20


@dataclass(frozen=True)
class Sample:
    """One labelled image.

    Attributes:
        path: the image file.
        label: class index, 0 ... C-1.
        box: (x0, y0, x1, y1) in pixels of the oriented image, which is cropped to the box; None takes the whole image.
    """

    path: Path
    label: int
    box: Box | None = None


@dataclass(frozen=True)
class DataSet:
    """A labelled data set.

    Attributes:
        root: the folder that the data set was read from.
        layout: the name of the adapter (`cub`, `pets`, ...); any other text for a data set made in code.
        class_names: C names in the order of the labels.
        train, val, test: the splits; `test` may be empty.
        crop: `boxes` where samples carry boxes, else None.
        warnings: one line for each kind of oddity that was found and tolerated.
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

    def describe(self) -> str:
        """Return one line for a person: what the folder was read as, and the sizes of the splits."""
        return (
            f"{self.layout} from {self.root}: {pluralize(self.num_classes, 'class', 'classes')}, "
            f"{pluralize(len(self.train), 'image to train on', 'images to train on')}, "
            f"{len(self.val):,} to validate, {len(self.test):,} to test"
            f"{', cropped to their boxes' if self.crop else ''}"
        )

    def summary(self) -> dict[str, Any]:
        """Return the counts that config.json keeps of the data set."""
        return {
            "root": str(self.root),
            "layout": self.layout,
            "classes": self.num_classes,
            "train": len(self.train),
            "val": len(self.val),
            "test": len(self.test),
            "crop": self.crop,
            "skipped": len(self.skipped),
        }


@dataclass(frozen=True)
class Split:
    """A stratified random split.

    Attributes:
        fraction: share of the images that go to the second part, in (0, 1).
        seed: seed of the shuffle.
    """

    fraction: float
    seed: int


SPLITS = {"authors": Split(fraction=0.2, seed=42)}


def stratified_split(
    labels: list[int],
    class_names: list[str],
    name: str = "authors",
    *,
    root: Path | None = None,
    part: str = "validation",
    advice: str = "add images, or give a val/ folder beside train/",
) -> tuple[list[int], list[int]]:
    """Split images class by class.

    Args:
        labels: class index of each image.
        class_names: C names, for errors.
        name: one of `SPLITS`.
        root: the data set's folder, for errors.
        part: what the second part is for, for errors.
        advice: what to do where no split is possible, for errors.

    Returns:
        Positions in `labels` of the first and of the second part, each ascending.

    Raises:
        UsageError: a class has a single image, or the second part would have fewer images than there are classes.
    """
    require("sklearn", "train", "a data set without an official split", pip_name="scikit-learn")
    from sklearn.model_selection import StratifiedShuffleSplit

    split = SPLITS[name]
    where = "" if root is None else f"{root}: "
    counts = Counter(labels)
    singles = [name for label, name in enumerate(class_names) if counts[label] == 1]
    if singles:
        raise UsageError(
            f"{where}no {part} split possible, classes with a single image: {shorten_list(singles)}; {advice}"
        )
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=split.fraction, random_state=split.seed)
    try:
        first, second = next(splitter.split(labels, labels))
    except ValueError as error:
        raise UsageError(
            f"{where}no {part} split possible, {pluralize(len(labels), 'image is', 'images are')} too few for "
            f"{pluralize(len(class_names), 'class', 'classes')} ({error}); {advice}"
        ) from None
    return sorted(int(i) for i in first), sorted(int(i) for i in second)


def classes_without_samples(samples: list[Sample], class_names: list[str]) -> list[str]:
    """Return the names of the classes that no sample has."""
    present = {sample.label for sample in samples}
    return [name for label, name in enumerate(class_names) if label not in present]


def display_path(path: Path, root: Path) -> str:
    """Return a path as messages show it: relative to `root` where it lies below."""
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def pluralize(number: int, singular: str, plural: str) -> str:
    """Return a number with the matching words: "1 image is", "1,200 images are"."""
    return f"{number:,} {singular if number == 1 else plural}"


def shorten_list(names: list[str]) -> str:
    """Return the first names separated by commas, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
