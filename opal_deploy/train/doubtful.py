"""What the out-of-fold answers say of single labels: a table of all answers, and a page of those that are doubtful."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.outputs import compute_probabilities
from opal_deploy.datasets.samples import DataSet, Sample, display_path
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.train.out_of_fold import OutOfFold
from opal_deploy.visualization.overlay import embed_jpeg
from opal_deploy.visualization.pages import Picture, render_page, save_page

# photographs on the page, the most doubtful ones, and their longer side in pixels
_SHOWN, _SIDE = 60, 240


def find_doubtful(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which labels the other folds contradict confidently, bool [n].

    Confident learning (Northcutt, Jiang and Chuang, JAIR 2021): another class than the label is the most probable, with
    at least the mean probability that photographs labelled with that class have of it. Probabilities, [n, C], are
    calibrated and out of fold; labels are int64 [n].
    """
    own = probabilities[np.arange(len(labels)), labels]
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    means = np.bincount(labels, own, minlength=probabilities.shape[1]) / np.maximum(counts, 1)
    predicted = probabilities.argmax(axis=1)
    doubtful: NDArray[np.bool_] = (predicted != labels) & (probabilities.max(axis=1) >= means[predicted])
    return doubtful


def write_answers(table: Path, page: Path, answers: OutOfFold, data: DataSet, temperature: float | None) -> int:
    """Write the answers as a table, one row per image, doubtful labels first, and a page of these; return their number.

    Probabilities are calibrated by `temperature`; without one, none are written and no label is doubted. Without a
    doubtful label there is no page.
    """
    logits, labels = answers.outputs.logits, answers.labels
    predicted, doubtful = logits.argmax(axis=1), np.zeros(len(labels), np.bool_)
    probabilities = None
    if temperature is not None:
        every = np.broadcast_to(np.arange(data.num_classes), logits.shape)
        probabilities = compute_probabilities(logits, every, temperature)
        doubtful = find_doubtful(probabilities, labels)
    with atomic_write(table) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["image", "label", "predicted", "probability", "label_probability", "doubtful"])
        for row in sorted(range(len(labels)), key=lambda row: not doubtful[row]):
            sample, own, other = data.train[answers.positions[row]], int(labels[row]), int(predicted[row])
            pair = ["", ""] if probabilities is None else [f"{probabilities[row, c]:.4f}" for c in (other, own)]
            names = [display_path(sample.path, data.root), data.class_names[own], data.class_names[other]]
            writer.writerow([*names, *pair, int(doubtful[row])])
    if probabilities is not None and doubtful.any():
        _write_page(page, answers, data, probabilities, np.flatnonzero(doubtful))
    return int(doubtful.sum())


def _write_page(
    page: Path, answers: OutOfFold, data: DataSet, probabilities: NDArray[np.float64], doubtful: NDArray[np.int64]
) -> None:
    """Write the page: each doubtful photograph with those of its label and of the other class that it is most like."""
    pooled, labels, predicted = answers.pooled, answers.labels, probabilities.argmax(axis=1)
    directions = pooled - pooled.mean(axis=0)
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), 1e-12)
    cards: list[dict[str, Any]] = []
    for row in sorted(doubtful.tolist(), key=lambda row: -probabilities[row].max())[:_SHOWN]:
        cosines = directions @ directions[row]
        cosines[row] = -2
        card: dict[str, Any] = {"picture": _picture(answers, data, row)}
        for kind, label in (("label", int(labels[row])), ("other", int(predicted[row]))):
            like = np.flatnonzero(labels == label)
            nearest = int(like[cosines[like].argmax()]) if len(like) else row
            picture = None if nearest == row else _picture(answers, data, nearest)
            card[kind] = {"name": data.class_names[label], "share": probabilities[row, label], "picture": picture}
        cards.append(card)
    text = render_page(__package__, "doubtful", cards=cards, total=len(doubtful), answered=len(labels))
    save_page(page, text)


def _picture(answers: OutOfFold, data: DataSet, row: int) -> Picture:
    sample: Sample = data.train[answers.positions[row]]
    image = decode(sample.path)
    image = image.crop(compute_geometry(image.size, sample.box).crop)
    image.thumbnail((_SIDE, _SIDE))
    return Picture(embed_jpeg(image), display_path(sample.path, data.root))
