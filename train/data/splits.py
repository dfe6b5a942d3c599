"""Splits by name, for data sets that come without one. A name always means the same pictures.

authors     scikit-learn's StratifiedShuffleSplit(test_size=0.2, random_state=42): a fifth of each class, as the
            paper's authors set their validation pictures aside
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from opal_deploy.errors import UsageError, require
from opal_deploy.train.data.samples import counted, listed


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
