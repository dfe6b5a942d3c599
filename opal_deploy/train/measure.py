"""The measurements of a run's best weights at its end: metrics, calibration, and those for `drift` and `--unknown`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.measurements import Calibration, ReceptiveField
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.evaluation.baseline import fit_neighbours, measure_baseline
from opal_deploy.evaluation.calibration import calibrate
from opal_deploy.evaluation.metrics import ClassCounts, Evaluation, count_by_class
from opal_deploy.evaluation.receptive_field import measure_receptive_field
from opal_deploy.logs import Log, Progress
from opal_deploy.model.backbones import load_classifier
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.train import machine
from opal_deploy.train.epoch import predict
from opal_deploy.train.frozen import HeadFit
from opal_deploy.train.images import Batches, TrainImages, normalize
from opal_deploy.train.machine import ProcessGroup

# images per forward pass of validation and tests
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run's best weights, in float32.

    Attributes:
        val, test: metrics on the validation and the test split; `test` is None without one.
        classes: answers per class on the test split, or on the validation split without one.
        calibration: fitted to the validation split.
        receptive_field, baseline: only of the process that writes the checkpoint; None in the others.
    """

    val: Evaluation
    test: Evaluation | None
    classes: list[ClassCounts]
    calibration: Calibration
    receptive_field: ReceptiveField | None
    baseline: Baseline | None

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of both splits, as the checkpoint keeps them."""
        return {**self.val.to_dict("val"), **(self.test.to_dict("test") if self.test else {})}


def compare_with_classifiers(
    fit: HeadFit,
    network: OpalNetwork,
    data: DataSet,
    weights: str | None,
    group: ProcessGroup,
    progress: Progress,
    log: Log,
) -> dict[str, float]:
    """Log and return the accuracies, 0 ... 1, of classifiers without explanations on the test or validation images.

    They are `linear_accuracy`, that of a linear classifier of the same features, and `classifier_accuracy`, that of the
    classifier in `weights`, if there is one of as many classes.

    Args:
        fit: of the network's head, with the features of the training images.
        network: with the backbone that the head was fitted to.
        data: without test images, the validation images are answered.
        weights: the backbone's initial weights; see `TrainOptions`.
        group: the processes of the run, of which only this one compares.
        progress: called with images done.
        log: called with one line per classifier.
    """
    config, split = network.config, "test" if data.test else "validation"
    images = TrainImages(data.test or data.val, config.input_size)
    batches = Batches(images, EVALUATION_BATCH, workers=_choose_workers(group))
    accuracies = {"linear_accuracy": fit.linear_accuracy(network, batches, progress)}
    log(
        f"without explanation, a linear classifier of the same features answers {accuracies['linear_accuracy']:.1%} of "
        f"the {split} images correctly"
    )
    classifier = load_classifier(config.backbone, data.num_classes, weights, config.input_size)
    if classifier is not None:
        accuracies["classifier_accuracy"] = _measure_classifier(classifier, config, batches, progress)
        log(
            f"the classifier in {weights} answers {accuracies['classifier_accuracy']:.1%} of them correctly, if its "
            "classes are in the same order"
        )
    return accuracies


def _choose_workers(group: ProcessGroup) -> int:
    """Return how many processes decode images that are read once: none next to a network on the CPU."""
    return machine.default_num_workers(group, cached=False) if group.device.type == "cuda" else 0


def _measure_classifier(classifier: nn.Module, config: NetworkConfig, batches: Batches, progress: Progress) -> float:
    """Return the accuracy of a classifier without slots, 0 ... 1, on images normalised as for the network."""
    correct = done = 0
    with torch.inference_mode():
        for images, labels in batches:
            logits = classifier(normalize(images, config.mean, config.std))
            correct += int((logits.argmax(1) == labels).sum())
            done += len(labels)
            progress(done, len(batches.images), "evaluating the classifier of the weights")
    return correct / done


def measure_best(
    network: OpalNetwork,
    data: DataSet,
    val_batches: Batches,
    background: list[Sample],
    group: ProcessGroup,
    progress: Progress,
) -> Measurements:
    """Measure a network with its best weights; the main process also gives it the neighbours of its training images.

    Args:
        network: on the group's device; changed only by `network.neighbours`.
        data: the data set that it was trained on.
        val_batches: of the validation split.
        background: out-of-distribution images for the neighbours; may be empty.
        group: the processes that share the work.
        progress: called with batches or images done.
    """
    machine.set_tf32(enabled=False)
    outputs = predict(network, val_batches, progress=progress, group=group)
    # in float32, which the epoch's own figures on a GPU are not
    val = outputs.compute_metrics(network.config.class_map)
    calibration = calibrate(outputs.logits, outputs.labels)
    # only the process that writes them measures them, on a bounded number of images
    receptive_field = baseline = test = None
    if group.is_main:
        receptive_field = measure_receptive_field(network, data.val)
        network.neighbours = fit_neighbours(network, data.train, background, progress=progress)
        checkpoint = Checkpoint(network, data.class_names, receptive_field=receptive_field)
        session = TorchSession(checkpoint, device=str(group.device))
        baseline = measure_baseline(session, data.val, network.neighbours, progress=progress)
    if data.test:
        images = TrainImages(data.test, network.config.input_size)
        share = {"rank": group.rank, "size": group.size}
        batches = Batches(images, EVALUATION_BATCH, workers=_choose_workers(group), **share)
        outputs = predict(network, batches, progress=progress, group=group)
        test = outputs.compute_metrics(network.config.class_map)
    classes = count_by_class(outputs.logits, outputs.labels, data.class_names)
    return Measurements(val, test, classes, calibration, receptive_field, baseline)
