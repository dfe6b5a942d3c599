"""One pass over images: the training step, the epoch's metrics, and evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.opal_head import embedding
from opal_deploy.evaluation.metrics import Evaluation, collapse_of_cells, compute_metrics, margins
from opal_deploy.logs import Progress, no_progress
from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.adversarial import DROP
from opal_deploy.train.attention import Terms
from opal_deploy.train.images import Batches, normalize
from opal_deploy.train.machine import MixedPrecision, ProcessGroup

# reading a loss waits until the GPU has caught up, so losses are read every so many steps
_GPU_STEPS_BETWEEN_READS = 10


class NonFiniteLossError(Exception):
    """The training loss is NaN or infinite.

    Attributes:
        step: the step in its epoch, counted from 0.
        loss: the loss.
        files: the images of its batch.
    """

    def __init__(self, step: int, loss: float, files: list[Path]) -> None:
        super().__init__(f"loss {loss} at step {step}")
        self.step, self.loss, self.files = step, loss, files


@dataclass
class EpochMetrics:
    """Running totals of an epoch.

    Attributes:
        loss: summed cross-entropy in nats, over all processes.
        correct: number of correct predictions, over all processes.
        seen: number of images, over all processes.
        seconds: seconds of this process.
        waited: seconds of this process spent waiting for batches.
        kept_off: summed penalty of kept-off regions, over all processes; 0 without.
    """

    loss: float = 0.0
    correct: float = 0.0
    seen: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    kept_off: float = 0.0


@dataclass(frozen=True)
class Objective:
    """The training loss: cross-entropy and the weighted terms of the attention.

    Attributes:
        agreement: weight of the mirror agreement; 0 without mirror images.
        keep_off: weight of the attention in kept-off regions; None without regions.
        adversarial: weight of the loss on images changed outside the boxes; 0 without them.
        class_weights: float32 [C] on the device, the loss's weight per class; None weighs all images the same.
        scale: factor of the logits, see `find_logit_scale`.
    """

    agreement: float = 0.0
    keep_off: float | None = None
    adversarial: float = 0.0
    class_weights: Tensor | None = None
    scale: float = 1.0

    def __call__(self, terms: Terms, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective and the weighted cross-entropy in nats, both summed over n images.

        Args:
            terms: of n images.
            labels: int64 [n], on the device.
        """
        # with mirror agreement the mean over an image and its mirror image
        views = len(terms.logits) // len(labels)
        cross_entropy = self._measure_cross_entropy(terms.logits, labels.repeat(views)) / views
        objective = cross_entropy + self.agreement * terms.disagreement.sum()
        objective = objective + (self.keep_off or 0.0) * terms.kept_off.sum()
        if terms.changed is not None and terms.drop is not None:
            changed = self._measure_cross_entropy(terms.changed, labels)
            objective = objective + self.adversarial * (changed + DROP * terms.drop.sum())
        return objective, cross_entropy.detach()

    def _measure_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = self.scale * logits.float()
        return functional.cross_entropy(logits, labels, weight=self.class_weights, reduction="sum")


def find_logit_scale(head: OpalHead, probability: float | None) -> float:
    """Return the factor, at least 1, that gives an embedding at its class's anchor this probability.

    The softmax of logits in [-1.41, 0] is far from certain even there: 0.31 for 10 classes, 0.04 for 100. The factor
    is 1 for None and for heads without anchors.
    """
    if probability is None or head.anchors is None or head.num_classes < 2:
        return 1.0
    anchors = torch.from_numpy(head.config.class_map(head.num_classes).matrix).to(head.anchors)
    with torch.no_grad():
        own, *others = sorted(head.classify(anchors[:1])[0].tolist(), reverse=True)
    odds = probability / (1 - probability) * len(others)
    return max(math.log(odds) / (own - others[0]), 1.0) if own > others[0] else 1.0


@dataclass
class TrainStep:
    """One optimizer step: forward, loss, backward, update.

    Attributes:
        model: a `NetworkTerms`, possibly compiled, possibly wrapped for several processes.
        mean, std: per channel R, G, B, for normalising the images.
        objective: the loss; with `keep_off`, images have four channels.
        frozen: layers that are not trained and compute as in evaluation, with the batch statistics that they have.
        scaler: the loss scaler, enabled for float16 only.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    amp: MixedPrecision
    group: ProcessGroup
    mean: tuple[float, ...]
    std: tuple[float, ...]
    objective: Objective
    frozen: nn.Module | None = None
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = self.amp.build_scaler()

    def step(self, images: Tensor, labels: Tensor, global_batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Do one step on this process's n images of a global batch.

        Args:
            images: uint8 [n, H0, W0, 3], or [n, H0, W0, 4] with regions.
            labels: int64 [n].
            global_batch: N, the number of images over all processes.

        Returns:
            Over the n images the summed, weighted cross-entropy, the number of correct predictions and the summed
            penalty of kept-off regions, scalars on the device.
        """
        labels = labels.to(self.group.device, non_blocking=True)
        images = images.to(self.group.device, non_blocking=True)
        with self.amp.autocast():
            terms: Terms = self.model(
                normalize(images[..., :3], self.mean, self.std), labels, read_regions_channel(images)
            )
        objective, cross_entropy = self.objective(terms, labels)
        self.optimizer.zero_grad(set_to_none=True)
        # gradients are averaged over processes, whose shares may differ by an image: this factor makes them the
        # gradients of the global batch's mean loss
        mean = objective * (self.group.size / global_batch)
        self.scaler.scale(mean).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        correct = (terms.logits[: len(labels)].detach().argmax(1) == labels).sum()
        return cross_entropy, correct, terms.kept_off.detach().sum()


def read_regions_channel(images: Tensor) -> Tensor | None:
    """Return the share of each pixel that is kept off, float [n, H0, W0], of images [n, H0, W0, 4]; None for three."""
    return images[..., 3].float() / 255.0 if images.shape[3] == 4 else None


def train_epoch(
    train_step: TrainStep,
    batches: Batches,
    metrics: EpochMetrics,
    *,
    learning_rate: Callable[[int], float],
    after_step: Callable[[int, EpochMetrics], None],
) -> None:
    """Train on all batches of `batches.epoch`, from `batches.first_step` on.

    Args:
        train_step: the step.
        batches: this process's share of the batches.
        metrics: running totals, updated in place.
        learning_rate: from the epoch's step, counted from 0, to its learning rate.
        after_step: called with the number of steps done and the metrics, each time losses were read.

    Raises:
        NonFiniteLossError: raised in every process alike.
        UsageError: an image cannot be decoded.
    """
    train_step.model.train()
    if train_step.frozen is not None:
        train_step.frozen.eval()
    plan = batches.plan()
    steps_between_reads = _GPU_STEPS_BETWEEN_READS if train_step.group.device.type == "cuda" else 1
    # steps whose sums are still on the device: (step, (loss, correct, penalty), images)
    unread: list[tuple[int, tuple[Tensor, Tensor, Tensor], int]] = []
    started = ended = time.perf_counter()
    for step, (images, labels) in enumerate(batches, batches.first_step):
        metrics.waited += time.perf_counter() - ended
        global_batch = len(plan[step])
        for parameters in train_step.optimizer.param_groups:
            parameters["lr"] = learning_rate(step)
        unread.append((step, train_step.step(images, labels, global_batch), global_batch))
        if len(unread) == steps_between_reads or step + 1 == len(plan):
            _read_losses(unread, metrics, train_step.group, batches)
            unread.clear()
            metrics.seconds += time.perf_counter() - started
            started = time.perf_counter()
            after_step(step + 1, metrics)
        ended = time.perf_counter()


def _read_losses(
    unread: list[tuple[int, tuple[Tensor, Tensor, Tensor], int]],
    metrics: EpochMetrics,
    group: ProcessGroup,
    batches: Batches,
) -> None:
    losses = torch.stack([loss for _, (loss, _, _), _ in unread]).double().tolist()
    losses = group.all_reduce_sum(*losses)
    for (step, _, num_images), loss in zip(unread, losses, strict=True):
        if not math.isfinite(loss):
            raise NonFiniteLossError(step, loss / num_images, batches.image_files(step))
    metrics.loss += math.fsum(losses)
    correct, kept_off = (float(torch.stack([sums[i] for _, sums, _ in unread]).double().sum()) for i in (1, 2))
    correct, kept_off = group.all_reduce_sum(correct, kept_off)
    metrics.correct += correct
    metrics.kept_off += kept_off
    metrics.seen += sum(num_images for _, _, num_images in unread)


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


def evaluate(
    network: OpalNetwork,
    batches: Batches,
    *,
    amp: MixedPrecision | None = None,
    progress: Progress = no_progress,
    group: ProcessGroup | None = None,
    scale: float = 1.0,
) -> Evaluation:
    """Return the metrics over all batches, the loss of logits times `scale`; see `predict`."""
    outputs = predict(network, batches, amp=amp, progress=progress, group=group)
    return outputs.compute_metrics(network.config.class_map, scale)


def predict(
    network: OpalNetwork,
    batches: Batches,
    *,
    amp: MixedPrecision | None = None,
    progress: Progress = no_progress,
    group: ProcessGroup | None = None,
) -> LabelledOutputs:
    """Return the outputs of all batches, computed on the network's device.

    Args:
        network: left in evaluation mode.
        batches: at least one image.
        amp: precision of the backbone; the head stays float32, as in exported files. None is float32 throughout.
        progress: called after each batch.
        group: the processes whose outputs are returned; None is this one.

    Raises:
        UsageError: names an image that cannot be decoded.
    """
    network.eval()
    device = next(network.parameters()).device
    config = network.config
    class_map = config.class_map
    parts: list[LabelledOutputs] = []
    done = 0
    with torch.inference_mode():
        for images, labels in batches:
            inputs = normalize(images.to(device, non_blocking=True), config.mean, config.std)
            with nullcontext() if amp is None else amp.autocast():
                features = network.backbone(inputs)
            outputs = network.head.explain(network.head.project(features if amp is None else features.float()))
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
    if group is not None:
        parts = [part for share in group.all_gather(parts) for part in share]
    whole: list[Any] = [None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)]
    return LabelledOutputs(*whole)
