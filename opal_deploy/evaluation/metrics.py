"""Metrics that need labels only, from a model's outputs; means with intervals, and how figures become JSON and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.outputs import find_largest
from opal_deploy.datasets.samples import describe_never_predicted

_TOP = 5
# classes listed with their accuracy, the lowest first
_LOWEST = 10
# thresholds in the summary of a curve: those that answer at least 1/10, 2/10, ... of the images
_NUM_LEVELS = 10
# error rates whose coverage a summary states
_ERROR_RATES = (0.01, 0.02, 0.05)
# samples of the bootstrap, and those in memory at a time
_RESAMPLES, _RESAMPLES_TOGETHER = 10_000, 100


class Figures:
    """Base of dataclasses of figures."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON, with the attributes' names as keys."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


@dataclass(frozen=True)
class Mean(Figures):
    """A mean, the ends of its 95 % interval, and the number of values."""

    mean: float
    low: float
    high: float
    count: int


def mean_with_interval(sample: ArrayLike) -> Mean:
    """Return the mean of a sample with its interval by the percentile bootstrap, from a generator with a fixed seed."""
    from scipy.stats import bootstrap

    values = np.asarray(sample, np.float64)
    mean, count = float(values.mean()), len(values)
    if count == 1:
        return Mean(mean, mean, mean, count)
    interval = bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, batch=_RESAMPLES_TOGETHER, method="percentile", rng=0
    ).confidence_interval
    return Mean(mean, float(interval.low), float(interval.high), count)


def format_rows(figures: Sequence[Figures], titles: Mapping[str, str]) -> Iterator[str]:
    """Yield a table with a row per item and a column per attribute, titled; shares as `84.0 % (82 to 86)`.

    Columns without any value are left out.
    """
    columns = {name: [format_cell(getattr(row, name)) for row in figures] for name in titles}
    columns = {name: cells for name, cells in columns.items() if {*cells} != {"-"}}
    yield from format_columns([[titles[name] for name in columns], *map(list, zip(*columns.values(), strict=True))])


def format_cell(value: Mean | float | str | None, digits: int = 1) -> str:
    """Return a share in percent, a mean share with its interval as `84.0 % (82 to 86)`; a dash for None."""
    if isinstance(value, Mean):
        return f"{100 * value.mean:.{digits}f} % ({100 * value.low:.0f} to {100 * value.high:.0f})"
    return f"{value:.{digits}%}" if isinstance(value, float) else value or "-"


def format_columns(rows: list[list[str]]) -> Iterator[str]:
    """Yield the rows of a table as aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *numbers]).rstrip()


def collapse_of_cells(cells: NDArray[np.int32], labels: NDArray[np.int64], class_map: ClassMap) -> NDArray[np.float64]:
    """Return the spatial prototype collapse of each image (paper, Supp. D.1), float64 [N], 0 ... 1.

    For an image of class c: 1 - (number of different cells among the class's m_c slots - 1) / (m_c - 1); a single slot
    cannot collapse, and the score is 0.

    Args:
        cells: [N, m], flat cells of the label's slots.
        labels: [N], class indices.
    """
    # a dropped slot repeats the first that is left
    kept, others = class_map.kept, class_map.counts[labels] - 1
    source = np.where(kept, np.arange(class_map.max_slots), kept.argmax(axis=1)[:, None])  # [C, m]
    ordered = np.sort(np.take_along_axis(cells, source[labels], axis=1), axis=1)
    different = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)  # [N]
    scores: NDArray[np.float64] = (others + 1 - different) / np.maximum(others, 1)
    return scores


def summarize_risk(margins: ArrayLike, correct: ArrayLike) -> dict[str, Any]:
    """Return the summary of the risk-coverage curve of N labelled images, at least one, over the margin.

    A classifier abstains where its margin is below a threshold. Coverage is the share of images that it answers, risk
    the share of wrong predictions among these. Images with equal margins are answered together. `aurc`, the area under
    the curve, is the mean over k = 1 ... N of the risk of the k largest margins, wrong answers being spread evenly over
    images with equal margins. `levels`, which `statistics.choose_threshold` reads, are margin, answered and wrong of
    the strictest threshold for each tenth of coverage.

    Args:
        margins: [N], finite; the predicted class's total minus that of the runner-up by logit.
        correct: bool [N], whether the prediction is the label.
    """
    sizes = np.asarray(margins, np.float64)
    order, images = np.argsort(-sizes, kind="stable"), len(sizes)
    falling, errors = sizes[order], np.cumsum(~np.asarray(correct, np.bool_)[order], dtype=np.int64)
    # every threshold that makes a difference, strictest first
    last = np.flatnonzero(np.append(falling[1:] != falling[:-1], True))
    answered, wrong, k = last + 1, errors[last], np.arange(1, images + 1)
    low_risk = {f"{rate:g}": answered[wrong <= rate * answered] for rate in _ERROR_RATES}
    counts = -(-np.arange(1, _NUM_LEVELS + 1) * images // _NUM_LEVELS)
    chosen = np.unique(np.searchsorted(answered, counts))
    columns = (values[chosen].tolist() for values in (falling[last], answered, wrong))
    return {
        "images": images,
        "error": int(wrong[-1]) / images,
        "aurc": float((np.interp(k, np.append(0, answered), np.append(0, wrong)) / k).mean()),
        "coverage_at_error": {rate: int(few.max(initial=0)) / images for rate, few in low_risk.items()},
        "levels": [list(level) for level in zip(*columns, strict=True)],
    }


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of N images."""

    accuracy: float  # top-1, 0 ... 1
    top5: float | None = None  # top-5 accuracy, 0 ... 1; None with no more than 5 classes
    macro_f1: float | None = None  # mean F1, 0 ... 1, of the classes that are a label or a prediction at least once
    loss: float  # cross-entropy over the logits, in nats
    images: int
    # summary of the risk-coverage curve over the margin, see `summarize_risk`; None without anchors
    risk: dict[str, Any] | None = None
    # mean over images, 0 ... 1 (paper, Supp. D.1); None for a network without slots
    spatial_prototype_collapse: float | None = None
    spatial_prototype_collapse_std: float | None = None  # standard deviation over images, as the paper's table gives it

    def to_dict(self, prefix: str) -> dict[str, Any]:
        """Return the metrics for JSON as `<prefix>_accuracy` and so on, without None values."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return {name if name.startswith("spatial") else f"{prefix}_{name}": value for name, value in known.items()}


def compute_metrics(
    logits: NDArray[np.float32], labels: NDArray[np.int64], collapse: NDArray[np.float64] | None = None,
    margins: NDArray[np.float64] | None = None,
) -> Evaluation:  # fmt: skip
    """Return every metric that can be computed from these outputs.

    Args:
        logits: [N, C], N at least 1.
        labels: [N], class indices.
        collapse: [N], see `collapse_of_cells`; None for a network without slots.
        margins: [N], see `summarize_risk`; None for a network without anchors.
    """
    from scipy.special import log_softmax
    from sklearn.metrics import f1_score

    predicted, best = logits.argmax(axis=1), find_largest(logits, _TOP)
    return Evaluation(
        images=len(labels),
        loss=-float(log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(labels)), labels].mean()),
        accuracy=float((predicted == labels).mean()),
        spatial_prototype_collapse=None if collapse is None else float(collapse.mean()),
        spatial_prototype_collapse_std=None if collapse is None else float(collapse.std()),
        top5=float((best == labels[:, None]).any(axis=1).mean()) if logits.shape[1] > _TOP else None,
        macro_f1=float(f1_score(labels, predicted, average="macro", zero_division=0.0)),
        risk=None if margins is None else summarize_risk(margins, predicted == labels),
    )


@dataclass(frozen=True)
class ClassCounts:
    """The answers about the images of one class."""

    label: str
    images: int  # images with this label
    correct: int  # of them, those predicted as this class
    predicted: int  # images of any label predicted as this class


def count_by_class(
    logits: NDArray[np.float32], labels: NDArray[np.int64], class_names: Sequence[str]
) -> list[ClassCounts]:
    """Return the counts of each class, in the order of the C class names, from logits [N, C] and labels [N]."""
    predicted, size = logits.argmax(axis=1), len(class_names)
    counts = (np.bincount(ids, minlength=size) for ids in (labels, labels[predicted == labels], predicted))
    return [ClassCounts(name, *map(int, row)) for name, *row in zip(class_names, *counts, strict=True)]


def format_classes(classes: Sequence[ClassCounts]) -> Iterator[str]:
    """Yield a line on classes that are never predicted, if any, and one on the classes with the lowest accuracy."""
    predicted = [row.label for row in classes if row.predicted]
    if never := describe_never_predicted({row.label: row.images for row in classes}, predicted):
        yield never
    others = sorted((row for row in classes if row.images and row.predicted), key=lambda row: row.correct / row.images)
    listed = ", ".join(f"{row.label} {row.correct} of {row.images}" for row in others[:_LOWEST])
    yield f"Lowest accuracy: {listed}" if len(others) > _LOWEST else f"Accuracy by class: {listed}"
