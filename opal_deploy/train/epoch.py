"""One pass over the training images: the training step, and the metrics of the epoch."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opal_deploy.train.distributed import ProcessGroup
from opal_deploy.train.images import Batches, normalize
from opal_deploy.train.setup import MixedPrecision

# reading a loss waits until the GPU has caught up, so it is done only every so many steps
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
    """

    loss: float = 0.0
    correct: float = 0.0
    seen: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0


@dataclass
class TrainStep:
    """One optimizer step: forward, loss, backward, update.

    Attributes:
        model: the network, perhaps compiled, perhaps wrapped for several processes.
        optimizer: the optimizer of the network's weights.
        amp: mixed precision.
        group: the processes of the run.
        mean, std: per channel R, G, B, which images are normalised with.
        agreement: weight of the mirror agreement; where it is not 0, `model` is a MirrorAgreement.
        scaler: the loss scaler; does something with float16 only.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    amp: MixedPrecision
    group: ProcessGroup
    mean: tuple[float, ...]
    std: tuple[float, ...]
    agreement: float = 0.0
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = self.amp.build_scaler()

    def step(self, images: Tensor, labels: Tensor, global_batch: int) -> tuple[Tensor, Tensor]:
        """Do one step on this process's n images of a global batch.

        Args:
            images: uint8 [n, H0, W0, 3].
            labels: int64 [n].
            global_batch: N, the number of images over all processes.

        Returns:
            The summed cross-entropy and the number of correct predictions of the n images, scalars on the device.
        """
        device = self.group.device
        labels = labels.to(device, non_blocking=True)
        inputs = normalize(images.to(device, non_blocking=True), self.mean, self.std)  # [n, 3, H0, W0]
        with self.amp.autocast():
            if self.agreement:
                logits, disagreement = self.model(inputs, labels)  # [2n, C] and [n]
            else:
                logits = self.model(inputs)  # [n, C]
        logits = logits.float()
        if self.agreement:
            # the mean over an image and its mirror image
            loss_sum = functional.cross_entropy(logits, torch.cat([labels, labels]), reduction="sum") / 2
            objective = loss_sum + self.agreement * disagreement.sum()
        else:
            objective = loss_sum = functional.cross_entropy(logits, labels, reduction="sum")
        self.optimizer.zero_grad(set_to_none=True)
        # gradients are averaged over processes, whose shares may differ by an image: this factor makes them the
        # gradients of the global batch's mean loss
        mean = objective * (self.group.size / global_batch)
        self.scaler.scale(mean).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss_sum.detach(), (logits[: len(labels)].detach().argmax(1) == labels).sum()


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
        metrics: running totals, which are added to.
        learning_rate: of the epoch's step, counted from 0.
        after_step: called with the number of steps done and the metrics, whenever losses were read.

    Raises:
        NonFiniteLossError: raised in every process alike.
        UsageError: an image cannot be decoded.
    """
    train_step.model.train()
    plan = batches.plan()
    steps_between_reads = _GPU_STEPS_BETWEEN_READS if train_step.group.device.type == "cuda" else 1
    # steps whose losses are still on the device: (step, loss sum, correct, images)
    unread: list[tuple[int, Tensor, Tensor, int]] = []
    timed_batches = _TimedBatches(batches)
    started = time.perf_counter()
    for step, (images, labels) in enumerate(timed_batches, batches.first_step):
        global_batch = len(plan[step])
        for parameters in train_step.optimizer.param_groups:
            parameters["lr"] = learning_rate(step)
        unread.append((step, *train_step.step(images, labels, global_batch), global_batch))
        if len(unread) == steps_between_reads or step + 1 == len(plan):
            _read_losses(unread, metrics, train_step.group, batches)
            unread.clear()
            now = time.perf_counter()
            metrics.seconds += now - started
            started = now
            metrics.waited += timed_batches.pop_seconds()
            after_step(step + 1, metrics)


def _read_losses(
    unread: list[tuple[int, Tensor, Tensor, int]], metrics: EpochMetrics, group: ProcessGroup, batches: Batches
) -> None:
    losses = torch.stack([loss for _, loss, _, _ in unread]).double().tolist()
    losses = group.all_reduce_sum(*losses)
    for (step, _, _, num_images), loss in zip(unread, losses, strict=True):
        if not math.isfinite(loss):
            raise NonFiniteLossError(step, loss / num_images, batches.image_files(step))
    metrics.loss += math.fsum(losses)
    metrics.correct += group.all_reduce_sum(float(torch.stack([correct for _, _, correct, _ in unread]).sum()))[0]
    metrics.seen += sum(num_images for _, _, _, num_images in unread)


class _TimedBatches:
    """Iterates over batches and counts the seconds spent waiting for them."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._seconds = 0.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        source = iter(self._batches)
        while True:
            started = time.perf_counter()
            batch = next(source, None)
            self._seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def pop_seconds(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def compile_model(model: nn.Module, enabled: bool) -> nn.Module:
    """Return the model through torch.compile, or as it is."""
    if not enabled:
        return model
    compiled: Any = torch.compile(model)
    return compiled  # type: ignore[no-any-return]


@contextlib.contextmanager
def open_summary_writer(log_dir: Path | None, first_epoch: int) -> Iterator[Any]:
    """Yield TensorBoard's writer, or None without a directory; earlier logs from `first_epoch` on are hidden."""
    if log_dir is None:
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(log_dir), purge_step=first_epoch)
    try:
        yield writer
    finally:
        writer.close()
