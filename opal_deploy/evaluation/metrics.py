"""Metrics that need labels only, from a model's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import ClassMap, find_margins
from opal_deploy.artifact.heads import find_totals
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, find_largest
from opal_deploy.datasets.samples import describe_never_predicted
from opal_deploy.statistics import Mean, compute_risk_curve

_TOP = 5
# classes listed with their accuracy, the lowest first
_LOWEST = 10


def top_k_accuracy(logits: NDArray[np.float32], labels: NDArray[np.int64], k: int) -> float:
    """Return the share of images, 0 ... 1, whose label is among the k largest logits; of equal ones the lower class.

    Args:
        logits: [N, C], N at least 1.
        labels: [N], class indices.
    """
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return float((best == labels[:, None]).any(axis=1).mean())


def margins(logits: NDArray[np.float32], values: NDArray[np.float64], class_map: ClassMap) -> NDArray[np.float64]:
    """Return the predicted class's total minus the total of the runner-up by logit, float64 [N].

    Args:
        logits: [N, C], C at least 2.
        values: [N, K], see `heads.find_values`.
    """
    best = find_largest(logits, 2)
    return find_margins(class_map.totals(class_map.take(values, best), best))


def collapse_per_image(
    argmax: NDArray[np.int32], labels: NDArray[np.int64], class_map: ClassMap
) -> NDArray[np.float64]:
    """Return the spatial prototype collapse of each image (paper, Supp. D.1), float64 [N], 0 ... 1.

    For an image of class c: 1 - (number of different cells among the class's m_c slots - 1) / (m_c - 1); a single slot
    cannot collapse, and the score is 0.

    Args:
        argmax: [N, K], flat cell of each channel's maximum.
        labels: [N], class indices.
    """
    return collapse_of_cells(class_map.take(argmax, labels), labels, class_map)


def collapse_of_cells(cells: NDArray[np.int32], labels: NDArray[np.int64], class_map: ClassMap) -> NDArray[np.float64]:
    """Return what `collapse_per_image` does, from the cells [N, m] of the label's channels only."""
    # a dropped slot repeats the first that is left
    kept = class_map.kept
    source = np.where(kept, np.arange(class_map.max_slots), kept.argmax(axis=1)[:, None])  # [C, m]
    ordered = np.sort(np.take_along_axis(cells, source[labels], axis=1), axis=1)
    repeated = class_map.counts[labels] - 1 - (np.diff(ordered, axis=1) != 0).sum(axis=1)  # [N]
    scores: NDArray[np.float64] = repeated / np.maximum(class_map.counts[labels] - 1, 1)
    return scores


@dataclass(frozen=True)
class Evaluation:
    """The metrics of N images.

    Attributes:
        loss: cross-entropy over the logits, in nats.
        accuracy: top-1, 0 ... 1.
        spatial_prototype_collapse: mean over images, 0 ... 1 (paper, Supp. D.1); None for a network without slots.
        spatial_prototype_collapse_std: standard deviation over images, as the paper's table gives it.
        top5: top-5 accuracy, 0 ... 1; None with no more than 5 classes.
        macro_f1: mean F1, 0 ... 1, of the classes that are a label or a prediction at least once.
        risk: summary of the risk-coverage curve over the margin, see `RiskCurve.summary`; None without anchors.
    """

    images: int
    loss: float
    accuracy: float
    spatial_prototype_collapse: float | None = None
    spatial_prototype_collapse_std: float | None = None
    top5: float | None = None
    macro_f1: float | None = None
    risk: dict[str, Any] | None = None

    def to_dict(self, prefix: str) -> dict[str, Any]:
        """Return the metrics for JSON as `<prefix>_accuracy` and so on, without None values."""
        figures = {
            f"{prefix}_accuracy": self.accuracy,
            f"{prefix}_top5": self.top5,
            f"{prefix}_macro_f1": self.macro_f1,
            f"{prefix}_loss": self.loss,
            f"{prefix}_images": self.images,
            f"{prefix}_risk": self.risk,
            "spatial_prototype_collapse": self.spatial_prototype_collapse,
            "spatial_prototype_collapse_std": self.spatial_prototype_collapse_std,
        }
        return {name: value for name, value in figures.items() if value is not None}


def compute_metrics(
    logits: NDArray[np.float32],
    labels: NDArray[np.int64],
    collapse: NDArray[np.float64] | None = None,
    margins: NDArray[np.float64] | None = None,
) -> Evaluation:
    """Return every metric that can be computed from these outputs.

    Args:
        logits: [N, C], N at least 1.
        labels: [N], class indices.
        collapse: [N], see `collapse_per_image`; None for a network without slots.
        margins: [N], see `metrics.margins`; None for a network without anchors.
    """
    from scipy.special import log_softmax
    from sklearn.metrics import f1_score

    predicted, mean, std = logits.argmax(axis=1), None, None
    if collapse is not None:
        mean, std = float(collapse.mean()), float(collapse.std())
    risk = None if margins is None else compute_risk_curve(margins, predicted == labels).summary()
    return Evaluation(
        images=len(labels),
        loss=-float(log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(labels)), labels].mean()),
        accuracy=float((predicted == labels).mean()),
        spatial_prototype_collapse=mean,
        spatial_prototype_collapse_std=std,
        top5=top_k_accuracy(logits, labels, _TOP) if logits.shape[1] > _TOP else None,
        macro_f1=float(f1_score(labels, predicted, average="macro", zero_division=0.0)),
        risk=risk,
    )


@dataclass(frozen=True)
class ClassCounts:
    """The answers about the images of one class.

    Attributes:
        images: images with this label.
        correct: of them, those predicted as this class.
        predicted: images of any label predicted as this class.
    """

    label: str
    images: int
    correct: int
    predicted: int


def count_by_class(
    logits: NDArray[np.float32], labels: NDArray[np.int64], class_names: Sequence[str]
) -> list[ClassCounts]:
    """Return the counts of each class, in the order of the class names.

    Args:
        logits: [N, C].
        labels: [N], class indices.
    """
    predicted, size = logits.argmax(axis=1), len(class_names)
    counts = (np.bincount(each, minlength=size) for each in (labels, labels[predicted == labels], predicted))
    return [ClassCounts(name, *map(int, row)) for name, *row in zip(class_names, *counts, strict=True)]


def format_never_predicted(classes: Sequence[ClassCounts]) -> str:
    """Return a line on the classes that are never predicted; empty if there is none."""
    images = {each.label: each.images for each in classes}
    return describe_never_predicted(images, [each.label for each in classes if each.predicted])


def format_classes(classes: Sequence[ClassCounts]) -> Iterator[str]:
    """Yield a line on classes that are never predicted, and one on the classes with the lowest accuracy."""
    present = [each for each in classes if each.images]
    if never := format_never_predicted(classes):
        yield never
    others = sorted((each for each in present if each.predicted), key=lambda each: each.correct / each.images)
    listed = ", ".join(f"{each.label} {each.correct} of {each.images}" for each in others[:_LOWEST])
    yield f"Lowest accuracy: {listed}" if len(others) > _LOWEST else f"Accuracy by class: {listed}"


@dataclass(frozen=True)
class Agreement:
    """The agreement of two models on the same N images.

    Attributes:
        same_class: share of images with the same predicted class.
        same_cells: share of equal cells among the m of the class that the first model predicts; None for models
            without slots, or with another m or grid.
        largest_cosine_difference: over all images and classes; None if a model has no cosines.
    """

    images: int
    same_class: float
    same_cells: float | None
    largest_cosine_difference: float | None


def measure_agreement(first: tuple[Outputs, Metadata], second: tuple[Outputs, Metadata]) -> Agreement:
    """Compare two models' outputs for the same images, row for row; both have the same classes."""
    (a, a_metadata), (b, b_metadata) = first, second
    a_map, b_map = a_metadata.class_map, b_metadata.class_map
    predicted = a.logits.argmax(axis=1)
    same_class = float((predicted == b.logits.argmax(axis=1)).mean())
    same_cells, largest_difference = None, None
    if a.scores is not None and b.scores is not None:
        a_cosines = find_totals(a.scores, a_metadata)
        b_cosines = find_totals(b.scores, b_metadata)
        largest_difference = float(np.abs(a_cosines - b_cosines).max())
    comparable = a_metadata.grid == b_metadata.grid and np.array_equal(a_map.channel_table, b_map.channel_table)
    if comparable and a.argmax is not None and b.argmax is not None:
        equal = a_map.take(a.argmax, predicted) == b_map.take(b.argmax, predicted)
        kept = (a_map.kept & b_map.kept)[predicted]
        same_cells = float(equal[kept].mean()) if kept.any() else None
    return Agreement(len(predicted), same_class, same_cells, largest_difference)


def figures_to_dict(figures: Any) -> dict[str, Any]:
    """Return a dataclass of figures for JSON, with its attributes' names as keys."""
    return {field.name: _to_json(getattr(figures, field.name)) for field in fields(figures)}


def _to_json(value: Any) -> Any:
    if isinstance(value, Mean):
        return value.to_dict()
    if is_dataclass(value):
        return figures_to_dict(value)
    if isinstance(value, dict):
        return {key: _to_json(each) for key, each in value.items()}
    return [_to_json(each) for each in value] if isinstance(value, list | tuple) else value


def format_percent(mean: Mean | None, digits: int = 0) -> str:
    """Return `84.0 % (82 to 86)`: a mean share with its interval; a dash for None."""
    if mean is None:
        return "-"
    low, high = mean.interval
    return f"{100 * mean.value:.{digits}f} % ({100 * low:.0f} to {100 * high:.0f})"


def format_columns(rows: list[list[str]]) -> Iterator[str]:
    """Yield the rows of a table as aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *numbers]).rstrip()
