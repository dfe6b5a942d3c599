"""One pass over the training pictures, and what it keeps count of."""

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

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.train.distributed import ProcessGroup
from opal_deploy.train.images import Batches, normalize
from opal_deploy.train.setup import MixedPrecision

# a GPU is asked for its losses only so often: each question waits until it has caught up
_GPU_STEPS_BETWEEN_READS = 10


class NonFiniteLossError(Exception):
    """The training loss is no number any more.

    Attributes:
        step: counted from 0 in its epoch.
        loss: what it is.
        files: the pictures of its batch.
    """

    def __init__(self, step: int, loss: float, files: list[Path]) -> None:
        super().__init__(f"loss {loss} at step {step}")
        self.step, self.loss, self.files = step, loss, files


@dataclass
class EpochMetrics:
    """Of the epoch under way, over all processes: loss, correct answers and pictures; seconds of this process."""

    loss: float = 0.0
    correct: float = 0.0
    seen: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0


@dataclass
class TrainStep:
    """What a step changes, and how it is computed.

    Attributes:
        model: the network, as it is called: perhaps compiled, perhaps spread over processes.
        optimizer: of the network's weights.
        amp: see Amp.
        group: see Group.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    amp: MixedPrecision
    group: ProcessGroup
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = self.amp.scaler()

    def step(self, images: Tensor, labels: Tensor, global_batch: int) -> tuple[Tensor, Tensor]:
        """One step on this process's share of a batch.

        Args:
            images: uint8 [n, H0, W0, 3].
            labels: int64 [n].
            global_batch: N, over all processes.

        Returns:
            The summed loss and the number of correct answers of the share, on the device.
        """
        device = self.group.device
        labels = labels.to(device, non_blocking=True)
        inputs = normalize(images.to(device, non_blocking=True), IMAGENET_MEAN, IMAGENET_STD)
        with self.amp.autocast():
            logits: Tensor = self.model(inputs).float()  # [n, C]
        loss_sum = functional.cross_entropy(logits, labels, reduction="sum")
        self.optimizer.zero_grad(set_to_none=True)
        # gradients are averaged over processes, whose shares may differ by a picture: with the size they become those
        # of the batch's mean
        mean = loss_sum * (self.group.size / global_batch)
        self.scaler.scale(mean).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss_sum.detach(), (logits.detach().argmax(1) == labels).sum()


def train_epoch(
    learner: TrainStep,
    batches: Batches,
    sums: EpochMetrics,
    *,
    after_step: Callable[[int, EpochMetrics], None],
) -> None:
    """All batches of `batches.epoch`, from `batches.first` on.

    Args:
        sums: added to, over all processes.
        after_step: called with the number of steps done and the sums, whenever the losses were read.

    Raises:
        LossNotFinite: in every process alike. UsageError: a picture cannot be decoded.
    """
    learner.model.train()
    plan = batches.plan()
    every = _GPU_STEPS_BETWEEN_READS if learner.group.device.type == "cuda" else 1
    # since the last reading: (step, loss sum, correct, pictures)
    unread: list[tuple[int, Tensor, Tensor, int]] = []
    waiting = _TimedBatches(batches)
    started = time.perf_counter()
    for step, (images, labels) in enumerate(waiting, batches.first):
        global_batch = len(plan[step])
        unread.append((step, *learner.step(images, labels, global_batch), global_batch))
        if len(unread) == every or step + 1 == len(plan):
            _read_losses(unread, sums, learner.group, batches)
            unread.clear()
            now = time.perf_counter()
            sums.seconds += now - started
            started = now
            sums.waited += waiting.take()
            after_step(step + 1, sums)


def _read_losses(
    unread: list[tuple[int, Tensor, Tensor, int]], sums: EpochMetrics, group: ProcessGroup, batches: Batches
) -> None:
    losses = torch.stack([loss for _, loss, _, _ in unread]).double().tolist()
    losses = group.total(*losses)
    for (step, _, _, pictures), loss in zip(unread, losses, strict=True):
        if not math.isfinite(loss):
            raise NonFiniteLossError(step, loss / pictures, batches.files(step))
    sums.loss += math.fsum(losses)
    sums.correct += group.total(float(torch.stack([correct for _, _, correct, _ in unread]).sum()))[0]
    sums.seen += sum(pictures for _, _, _, pictures in unread)


class _TimedBatches:
    """Batches, and the seconds that were spent waiting for them."""

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

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def compile_model(model: nn.Module, wanted: bool) -> nn.Module:
    """Through torch.compile, where asked for."""
    if not wanted:
        return model
    found: Any = torch.compile(model)
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def open_summary_writer(folder: Path | None, first_epoch: int) -> Iterator[Any]:
    """TensorBoard's writer, or None; what an earlier process logged from `first_epoch` on is hidden."""
    if folder is None:
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=first_epoch)
    try:
        yield writer
    finally:
        writer.close()
