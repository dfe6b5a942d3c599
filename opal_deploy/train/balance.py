"""Class imbalance in the training images: weights that compensate it, and warnings. Imports no torch."""

from __future__ import annotations

from collections import Counter

from opal_deploy.datasets.samples import DataSet, pluralize, shorten_list

# classes are called unbalanced from this ratio of the most to the fewest training images on
UNBALANCED_RATIO = 3.0
# with fewer training images a class is called small: two more are its validation images, which judge nothing
SMALL_CLASS = 10


def balanced_weights(data: DataSet) -> list[float]:
    """Return a weight per class, N / (C * n_c), as scikit-learn's `balanced` does it.

    N is the number of training images, n_c that of class c, at least 1; the mean weight over the images is 1.
    """
    counts = _count(data)
    return [len(data.train) / (data.num_classes * count) for count in counts]


def balance_warnings(data: DataSet, *, weighted: bool) -> list[str]:
    """Return a line if classes are unbalanced, and one if some are small; `weighted`: the run uses balanced weights."""
    counts, names, lines = _count(data), data.class_names, []
    most, fewest = max(counts), min(counts)
    if most >= UNBALANCED_RATIO * fewest and not weighted:
        lines.append(
            f"unbalanced classes: {names[counts.index(most)]} has {most:,} training images and "
            f"{names[counts.index(fewest)]} {fewest:,}; --class-weights balanced gives all classes the same weight"
        )
    small = [f"{name} {count}" for name, count in zip(names, counts, strict=True) if count < SMALL_CLASS]
    if small:
        lines.append(
            f"few images: {pluralize(len(small), 'class has', 'classes have')} fewer than {SMALL_CLASS} training "
            f"images ({shorten_list(small)}); add images of them"
        )
    return lines


def _count(data: DataSet) -> list[int]:
    found = Counter(sample.label for sample in data.train)
    return [max(1, found[label]) for label in range(data.num_classes)]
