"""Out-of-fold answers: every photograph trains the model, and its figures are those of heads that had not seen it.

The frozen backbone's features are in memory, so fitting a head takes seconds. The photographs are cut into five folds;
a head fitted to four of them answers the fifth. These answers stand in for a validation split: accuracy, calibration,
thresholds, and labels that the other folds contradict. The head that is kept is fitted to all photographs. Copies of a
photograph share a fold: features that are nearly equal would make an answer a memory.

A plain classifier of the same features, the logistic regression that anybody would try first, answers the same folds.
"""

from __future__ import annotations

import csv
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.cluster import DBSCAN
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.outputs import Outputs, compute_probabilities
from opal_deploy.datasets.samples import DataSet, Sample, display_path
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.metrics import mean_with_interval
from opal_deploy.evaluation.patches import MAX_IMAGES
from opal_deploy.evaluation.record import pool_features
from opal_deploy.evaluation.session import choose_samples
from opal_deploy.model.backbones import own_stride
from opal_deploy.model.head import OpalHead
from opal_deploy.model.neighbours import Neighbours, max_images
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.runtime.torch_session import to_outputs
from opal_deploy.train.head_fit import FrozenFeatures, fit_head
from opal_deploy.train.losses import make_objective
from opal_deploy.train.network import Run, build_network
from opal_deploy.visualization.overlay import embed_jpeg
from opal_deploy.visualization.pages import Picture, render_page, save_page

FOLDS = 5
PLAIN = "a logistic regression on the network's mean features, without explanation"
# folds are answered until there are so many answers: the accuracy's standard error is then at most 2 points
ENOUGH_ANSWERS = 600
# photographs whose pooled features have at least this cosine count as copies, see `group_copies`: of 180 birds, copies
# saved again at JPEG quality 60 had 0.94 at least, different photographs 0.72 at most
COPY_COSINE = 0.9
# inverse strengths of the logistic regression's penalty, of which the best counts
_STRENGTHS = (0.01, 0.1, 1.0)
_BATCH = 64
# pairs of classes that are listed as confused
_PAIRS = 3
# photographs on the page of doubtful labels, the most doubtful ones, and their longer side in pixels
_SHOWN, _SIDE = 60, 240


@dataclass(frozen=True)
class OutOfFold:
    """The answers to n training images, each by a head that was fitted to the other folds."""

    positions: NDArray[np.int64]  # [n], of the images in the data set's training images, ascending
    labels: NDArray[np.int64]  # [n]
    outputs: Outputs  # of all n images, with OOD scores by the neighbours among the other folds
    plain: NDArray[np.bool_]  # [n], whether the logistic regression is right
    pooled: NDArray[np.float32]  # [n, D], means of the frozen network's features over the cells


class TrainingOutputs(NamedTuple):
    """A network's outputs for n training images, of which neighbours and patches are chosen."""

    positions: list[int]  # [n], of the images in the data set's training images, ascending
    outputs: Outputs
    neighbours: Neighbours | None  # None where there are none, see `Neighbours.fit`


def count_folds(images: int) -> int:
    """Return how many of the folds are answered."""
    return min(FOLDS, math.ceil(ENOUGH_ANSWERS * FOLDS / images))


def assign_folds(pooled: Tensor, labels: Tensor, seed: int) -> NDArray[np.int64]:
    """Return the fold of each image, 0 ... 4, with all classes in each as far as there are images.

    Labels are int64 [n]; features are those of `group_copies`. UsageError: no class has two different images.
    """
    groups, folds = group_copies(pooled), np.zeros(len(labels), np.int64)
    most = max(len(np.unique(groups[labels.numpy() == label])) for label in set(labels.tolist()))
    if most < 2:
        raise UsageError("each class has one image, or copies of one; add images: at least two different per class")
    splitter = StratifiedGroupKFold(min(FOLDS, most), shuffle=True, random_state=seed % (1 << 32))
    with warnings.catch_warnings():
        # of classes with fewer images than folds: their answers show it
        warnings.simplefilter("ignore", UserWarning)
        for fold, (_, rows) in enumerate(splitter.split(labels, labels, groups)):
            folds[rows] = fold
    return folds


def group_copies(pooled: Tensor) -> NDArray[np.int64]:
    """Return a number per image, equal for images that are nearly the same: re-encoded, resized, or of one burst.

    They are told by the means of the frozen network's features over the cells, float32 [n, D].
    """
    # with one sample enough for a cluster: whatever a chain of near copies connects
    neighbours = DBSCAN(eps=1 - COPY_COSINE, min_samples=1, metric="cosine")
    return np.asarray(neighbours.fit_predict((pooled - pooled.mean(0)).numpy()))


def answer_out_of_fold(run: Run, network: OpalNetwork, frozen: FrozenFeatures, background: Tensor) -> OutOfFold:
    """Return the out-of-fold answers to the training images; each by a new head.

    The run has one process. The network's backbone computed the features, of one view of every training image or more.
    Those of out-of-distribution images, `background`, are pooled, float32 [b, D]; see `Neighbours`.
    """
    options, images = run.options, len(frozen.labels) // frozen.views
    shown = [run.data.train[position] for position in frozen.positions[:images]]
    first = assign_folds(frozen.pooled[:images], frozen.labels[:images], options.seed)
    fold_of_position = np.empty(int(frozen.positions.max()) + 1, np.int64)
    fold_of_position[frozen.positions[:images]] = first
    folds = torch.from_numpy(fold_of_position)[frozen.positions]  # of each row
    plain_features = find_plain_features(run, network, frozen)
    parts: list[tuple[Tensor, Outputs, NDArray[np.bool_]]] = []
    answered = np.unique(first)[: count_folds(images)]
    for number, fold in enumerate(answered.tolist(), 1):
        others, rows = torch.nonzero(folds != fold)[:, 0], torch.nonzero(folds[:images] == fold)[:, 0]
        head = new_head(network, frozen, options.seed)
        fit_head(
            head, frozen, make_objective(options, run.data, head, fitting=True), run.fabric,
            steps=options.head_steps, progress=run.progress, among=others,
            note=f"fitting the head of fold {number} of {len(answered)}",
        )  # fmt: skip
        seen = others[others < images]
        neighbours = choose_neighbours(network, [shown[row] for row in seen], frozen.pooled[seen], background)
        right = answer_plainly(plain_features, frozen.labels, others, rows)
        parts.append((rows, compute_outputs(head, neighbours, frozen, rows), right))
    if any(outputs.ood_score is None for _, outputs, _ in parts):
        # a fold with too few images for neighbours
        parts = [(rows, replace(outputs, ood_score=None), right) for rows, outputs, right in parts]
    rows = torch.cat([part[0] for part in parts])
    order = frozen.positions[rows].argsort()
    # the best of the penalties over all folds
    plain = np.concatenate([part[2] for part in parts], axis=1)
    best: NDArray[np.bool_] = plain[plain.sum(axis=1).argmax()][order]
    outputs, rows = Outputs.concatenate([part[1] for part in parts]).take(order.tolist()), rows[order]
    positions, labels, pooled = (tensor[rows].numpy() for tensor in (frozen.positions, frozen.labels, frozen.pooled))
    return OutOfFold(positions, labels, outputs, best, pooled)


def answer_images_in_memory(
    run: Run, network: OpalNetwork, head: OpalHead, frozen: FrozenFeatures, background: Tensor
) -> TrainingOutputs | None:
    """Return the outputs of the fitted head for the images in memory; None unless single cells are its evidence.

    Arguments are those of `answer_out_of_fold`.
    """
    if network.config.head.evidence != "exact":
        return None
    images = len(frozen.labels) // frozen.views
    shown = [run.data.train[position] for position in frozen.positions[:images]]
    rows = frozen.positions[:images].argsort()
    rows = rows[choose_samples([shown[row] for row in rows], MAX_IMAGES)]
    neighbours = choose_neighbours(network, shown, frozen.pooled[:images], background)
    return TrainingOutputs(frozen.positions[rows].tolist(), compute_outputs(head, None, frozen, rows), neighbours)


def choose_neighbours(
    network: OpalNetwork, samples: Sequence[Sample], pooled: Tensor, background: Tensor
) -> Neighbours | None:
    """Return the neighbours among training images, as many evenly over the classes as a model keeps.

    Pooled features, float32 [n, D], are those of the samples; `background` is as in `answer_out_of_fold`.
    """
    if network.config.head.evidence != "exact":
        return None
    kept = choose_samples(samples, max_images(network.config.num_classes))
    labels = torch.tensor([samples[index].label for index in kept])
    # a clone, since a module cannot keep tensors of inference mode
    neighbours = Neighbours.fit(pooled[kept].clone(), labels, background)
    return None if neighbours is None else neighbours.to(next(network.parameters()).device)


def new_head(network: OpalNetwork, frozen: FrozenFeatures, seed: int) -> OpalHead:
    """Return an unfitted head of features in memory on the network's device; torch's generators stay as they were."""
    device = next(network.parameters()).device
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return OpalHead(frozen.features.shape[1], network.config.num_classes, network.config.head).to(device)


def compute_outputs(head: OpalHead, neighbours: Neighbours | None, frozen: FrozenFeatures, rows: Tensor) -> Outputs:
    """Return the outputs for rows of the features of a head that was fitted to features in memory."""
    device, batches = next(head.parameters()).device, []
    with torch.inference_mode():
        for part in torch.split(rows, _BATCH):
            outputs = head.explain(head.project(frozen.features[part].to(device).float()))
            if neighbours is not None:
                outputs.ood_score = neighbours(frozen.pooled[part][:, :, None, None].to(device))
            batches.append(to_outputs(outputs))
    return Outputs.concatenate(batches)


def find_plain_features(
    run: Run, network: OpalNetwork, frozen: FrozenFeatures, samples: Sequence[Sample] = ()
) -> Tensor:
    """Return the features of the rows in memory, and of more samples, for the logistic regression: float32 [n, P].

    They are the last feature map's of the whole network, even where the run's ends earlier; from a checkpoint of
    `--start-from`, which has no later layers, those of its network.
    """
    options, last = run.options, network.backbone.maps[-1]
    ends_early = network.backbone.stride != own_stride(options.backbone) and not options.keep_layers
    if not ends_early or run.start is not None:
        return torch.cat([frozen.pooled, pool_features(network, samples, progress=run.progress)])[:, -last:]
    whole = build_network(replace(options, stride=None), run.data.class_names, None).to(run.fabric.device)
    features = pool_features(whole, [*run.data.train, *samples], progress=run.progress)
    known = len(run.data.train)
    return torch.cat([features[:known][frozen.positions], features[known:]])


def answer_plainly(features: Tensor, labels: Tensor, fitted: Tensor, answered: Tensor) -> NDArray[np.bool_]:
    """Return whether logistic regressions of each of `_STRENGTHS` answer rows right, bool [strengths, answered rows].

    They are fitted to other rows of the features, float32 [n, P], which are standardised, and labels, int64 [n].
    """
    x, y, rows, others = features.numpy(), labels.numpy(), answered.numpy(), fitted.numpy()
    if len(np.unique(y[others])) == 1:
        return np.array([y[rows] == y[others][0]] * len(_STRENGTHS))
    right = []
    for strength in _STRENGTHS:
        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=500))
        right.append(classifier.fit(x[others], y[others]).predict(x[rows]) == y[rows])
    return np.array(right)


def compare_plainly(run: Run, network: OpalNetwork, frozen: FrozenFeatures) -> str:
    """Return a line on what a logistic regression answers on the validation images."""
    val = run.data.val
    features = find_plain_features(run, network, frozen, val)
    labels = torch.cat([frozen.labels, torch.tensor([sample.label for sample in val])])
    rows = torch.arange(len(labels))
    right = answer_plainly(features, labels, rows[: -len(val)], rows[-len(val) :])
    return f"{PLAIN}: {right.mean(axis=1).max():.1%} of {len(val):,} validation images"


def describe_answers(answers: OutOfFold, data: DataSet) -> Iterator[str]:
    """Yield lines on the accuracy out of fold, the classes that are confused most, and the plain classifier."""
    names, predicted, count = data.class_names, answers.outputs.logits.argmax(axis=1), len(answers.labels)
    right = predicted == answers.labels
    low, high = binomtest(int(right.sum()), count).proportion_ci(method="wilson")
    yield (
        f"out of fold, each image answered by a head fitted to the other folds: {right.mean():.1%} of {count:,} right "
        f"(95 %: {low:.0%} to {high:.0%})"
    )
    pairs = Counter(zip(answers.labels[~right].tolist(), predicted[~right].tolist(), strict=True)).most_common(_PAIRS)
    if pairs:
        confused = ", ".join(f"{names[label]} as {names[other]} {number}" for (label, other), number in pairs)
        yield f"most often confused: {confused}"
    lead = mean_with_interval(right.astype(float) - answers.plain)
    yield (
        f"{PLAIN}: {answers.plain.mean():.1%} "
        f"(difference {100 * lead.mean:+.1f} points, 95 %: {100 * lead.low:+.1f} to {100 * lead.high:+.1f})"
    )


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
    return np.asarray((predicted != labels) & (probabilities.max(axis=1) >= means[predicted]))


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
    sample = data.train[answers.positions[row]]
    image = decode(sample.path)
    image = image.crop(compute_geometry(image.size, sample.box).crop)
    image.thumbnail((_SIDE, _SIDE))
    return Picture(embed_jpeg(image), display_path(sample.path, data.root))
