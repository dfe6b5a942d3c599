"""What a data set is: pictures with labels, in three splits. Plain data; no picture is opened here.

Splits by name, for data sets that come without one. A name always means the same pictures.

authors     scikit-learn's StratifiedShuffleSplit(test_size=0.2, random_state=42): a fifth of each class, as the
            paper's authors set their validation pictures aside"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from opal_deploy.errors import UsageError, require
from opal_deploy.preprocess.geometry import Box

Crop = Literal["boxes"]
# called with pictures done, in all where that is known, and a word on what is done
Report = Callable[[int, int | None, str], None]

# how many names an error or a warning spells out before it only counts
LISTED = 20


@dataclass(frozen=True)
class Sample:
    """One labelled picture.

    Attributes:
        path: its file.
        label: class index, 0 ... C-1.
        box: (x0, y0, x1, y1) in pixels of the oriented picture, which is cropped to it first; None takes all of it.
    """

    path: Path
    label: int
    box: Box | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set as the trainer takes it.

    Attributes:
        root: the folder it was read from.
        layout: the name it was read under (`cub`, `pets`, ...); anything else for one put together in code.
        class_names: C names in the order of the labels.
        train, val, test: samples; `test` may be empty.
        crop: `boxes` where samples carry boxes, else None.
        warnings: one line each, what was found odd and passed over.
        skipped: pictures left out because they are missing or their headers cannot be read.
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
        """C."""
        return len(self.class_names)

    def describe(self) -> str:
        """One line for a person: what the folder was read as, and what is in it."""
        pictures = counted(len(self.train), "picture to train on", "pictures to train on")
        return (
            f"{self.layout} from {self.root}: {counted(self.num_classes, 'class', 'classes')}, {pictures}, "
            f"{len(self.val):,} to validate, {len(self.test):,} to test"
            f"{', cropped to their boxes' if self.crop else ''}"
        )

    def summary(self) -> dict[str, Any]:
        """Counts for the run's records."""
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


def classes_without(samples: list[Sample], class_names: list[str]) -> list[str]:
    """Names of the classes that no sample is of."""
    present = {sample.label for sample in samples}
    return [name for label, name in enumerate(class_names) if label not in present]


def shown(path: Path, root: Path) -> str:
    """A file as messages name it: relative to the data set's folder where it lies in it."""
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def counted(number: int, one: str, many: str) -> str:
    """A number with the words that go with it: "1 picture is", "1,200 pictures are"."""
    return f"{number:,} {one if number == 1 else many}"


def listed(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


@dataclass(frozen=True)
class Split:
    """A stratified shuffle.

    Attributes:
        fraction: of the pictures that go to the second part, in (0, 1).
        seed: of the shuffle.
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
    advice: str = "add pictures, or give a val/ folder beside train/",
) -> tuple[list[int], list[int]]:
    """Split pictures class by class.

    Args:
        labels: class index of each picture.
        class_names: C names, for errors.
        name: one of `SPLITS`.
        root: the data set's folder, for errors.
        part: what the second part is for, for errors.
        advice: what to do where no split is possible, for errors.

    Returns:
        Positions in `labels` that stay and that are set aside, each ascending.

    Raises:
        UsageError: a class with one picture, or fewer pictures to set aside than classes.
    """
    require("sklearn", "train", "a data set without an official split", pip_name="scikit-learn")
    from sklearn.model_selection import StratifiedShuffleSplit

    split = SPLITS[name]
    where = "" if root is None else f"{root}: "
    counts = Counter(labels)
    lonely = [name for label, name in enumerate(class_names) if counts[label] == 1]
    if lonely:
        raise UsageError(f"{where}no {part} split possible, classes with a single picture: {listed(lonely)}; {advice}")
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=split.fraction, random_state=split.seed)
    try:
        kept, aside = next(splitter.split(labels, labels))
    except ValueError as error:
        raise UsageError(
            f"{where}no {part} split possible, {counted(len(labels), 'picture is', 'pictures are')} too few for "
            f"{counted(len(class_names), 'class', 'classes')} ({error}); {advice}"
        ) from None
    return sorted(int(i) for i in kept), sorted(int(i) for i in aside)
