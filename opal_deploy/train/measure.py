"""Outputs of a network for labelled images, and the measurements of a run's best weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.measurements import Calibration, ReceptiveField
from opal_deploy.artifact.opal_head import embedding
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.evaluation.calibration import calibrate
from opal_deploy.evaluation.cells import measure_receptive_field
from opal_deploy.evaluation.metrics import (
    ClassCounts,
    Evaluation,
    collapse_of_cells,
    compute_metrics,
    count_by_class,
    margins,
)
from opal_deploy.evaluation.record import fit_neighbours, measure_baseline
from opal_deploy.logs import Progress, no_progress
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.train.images import Batches, Loaders, normalize
from opal_deploy.train.machine import autocast, gather, set_tf32


class LabelledOutputs(NamedTuple):
    """The outputs for n images and their labels, as far as metrics need them.

    Attributes:
        logits: float32 [n, C].
        labels: int64 [n].
        cells: int32 [n, m], the cells of the labelled class's slots; None for a network without slots. Those of all
            slots would be gigabytes for many classes, which every process would send to every other.
        margins: float64 [n], see `metrics.margins`; None for a network without anchors.
    """

    logits: NDArray[np.float32]
    labels: NDArray[np.int64]
    cells: NDArray[np.int32] | None
    margins: NDArray[np.float64] | None

    def compute_metrics(self, class_map: ClassMap, scale: float = 1.0) -> Evaluation:
        """Return the metrics over all images of a network with this map, the loss of logits times `scale`."""
        collapse = None if self.cells is None else collapse_of_cells(self.cells, self.labels, class_map)
        return compute_metrics(np.float32(scale) * self.logits, self.labels, collapse, self.margins)


def predict(
    network: OpalNetwork,
    batches: Batches,
    fabric: Fabric | None = None,
    *,
    lower_precision: bool = False,
    progress: Progress = no_progress,
) -> LabelledOutputs:
    """Return the outputs of all batches, computed on the network's device.

    Args:
        network: left in evaluation mode.
        batches: at least one image.
        fabric: the processes whose outputs are returned; None is this one.
        lower_precision: compute the backbone in the run's precision; the head stays float32, as in exported files.
        progress: called after each batch.

    Raises:
        UsageError: names an image that cannot be decoded.
    """
    network.eval()
    device, config, class_map = next(network.parameters()).device, network.config, network.config.class_map
    parts: list[LabelledOutputs] = []
    done = 0
    with torch.inference_mode():
        for images, labels in batches:
            inputs = normalize(images.to(device, non_blocking=True), config.mean, config.std)
            with autocast(fabric if lower_precision else None):
                features = network.backbone(inputs)
            outputs = network.head.explain(network.head.project(features.float()))
            logits = outputs.logits.float().cpu().numpy()
            cells = batch_margins = None
            if outputs.argmax is not None:
                channels = torch.from_numpy(class_map.channel_table[labels.numpy()]).to(device)  # [n, m]
                cells = outputs.argmax.gather(1, channels).cpu().numpy()
            if outputs.scores is not None:
                scores = outputs.scores.float().cpu().numpy()
                batch_margins = margins(logits, embedding(scores, config.head.epsilon), class_map)
            parts.append(LabelledOutputs(logits, labels.numpy(), cells, batch_margins))
            done += len(labels)
            progress(done, len(batches.images), "evaluating")
    parts = [part for share in gather(fabric, parts) for part in share]
    whole: list[Any] = [None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)]
    return LabelledOutputs(*whole)


@dataclass(frozen=True)
class Measurements:
    """The measurements of a network for its checkpoint, in float32.

    Attributes:
        val, test: metrics on the validation and the test split; `test` is None without one.
        classes: answers per class on the test split, or on the validation split without one.
        calibration: fitted to the validation split.
        receptive_field, baseline, neighbours: only of the process that writes the checkpoint; None in the others.
    """

    val: Evaluation
    test: Evaluation | None
    classes: list[ClassCounts]
    calibration: Calibration
    receptive_field: ReceptiveField | None
    baseline: Baseline | None
    neighbours: Neighbours | None

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of both splits, as the checkpoint keeps them."""
        return {**self.val.to_dict("val"), **(self.test.to_dict("test") if self.test else {})}


def measure_network(
    network: OpalNetwork,
    data: DataSet,
    loaders: Loaders,
    background: list[Sample],
    fabric: Fabric,
    progress: Progress,
) -> Measurements:
    """Measure a network for its checkpoint.

    `background` are out-of-distribution images, perhaps none: the OOD score's other side (`fit_neighbours`).
    """
    set_tf32(enabled=False)
    class_map = network.config.class_map
    outputs = predict(network, loaders.val, fabric, progress=progress)
    val, calibration = outputs.compute_metrics(class_map), calibrate(outputs.logits, outputs.labels)
    # only the process that writes them measures them, on a bounded number of images
    receptive_field = baseline = neighbours = test = None
    if fabric.is_global_zero:
        receptive_field = measure_receptive_field(network, data.val)
        neighbours = network.neighbours = fit_neighbours(network, data.train, background, progress=progress)
        session = TorchSession(
            Checkpoint(network, data.class_names, receptive_field=receptive_field), device=str(fabric.device)
        )
        baseline = measure_baseline(session, data.val, neighbours, progress=progress)
        network.neighbours = None
    if loaders.test is not None:
        outputs = predict(network, loaders.test, fabric, progress=progress)
        test = outputs.compute_metrics(class_map)
    classes = count_by_class(outputs.logits, outputs.labels, data.class_names)
    return Measurements(val, test, classes, calibration, receptive_field, baseline, neighbours)
