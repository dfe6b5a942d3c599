"""What a run will cost, said before its first step: numbers of images, and times measured here on the first of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.head_fit import BATCH, DIRECTIONS, LEAST_PASSES, VIEWS
from opal_deploy.train.images import TrainImages, normalize
from opal_deploy.train.network import Run

# a training step costs about three forward passes
PASSES = 3
# images of the batch that is timed
_MEASURED = 8


def describe_cost(run: Run, network: OpalNetwork, images: TrainImages, heads: int) -> str:
    """Return a line on the numbers of images, and on the time until best.pt, with `heads` to fit, and for all epochs.

    The network's backbone is timed on the first training `images`, its head on random features.
    """
    data, options, processes = run.data, run.options, run.fabric.world_size
    forward = measure_seconds_per_image(network, images) / processes
    # attacked images triple the work of a step
    epoch = forward * (PASSES * (3 if options.adversarial else 1) * len(data.train) + len(data.val))
    epochs = options.epochs or 0
    line = f"{len(data.train):,} training, {len(data.val):,} validation, {len(data.test):,} test images; "
    if heads:
        seen = len(VIEWS) * len(data.train)
        steps = heads * max(options.head_steps, LEAST_PASSES * math.ceil(seen / BATCH))
        # validation images are answered twice: for metrics and for the baseline
        first = forward * (seen + 2 * len(data.val) + (0 if epochs else len(data.test)))
        line += f"best.pt in about {_round(first + steps * measure_seconds_per_step(network) / processes)}"
        if not epochs:
            return line
        line += ", then "
    line += f"{epochs} epochs of about {_round(epoch)} each, {_round(epochs * epoch)} in all"
    return line + ("; --epochs 0 fits the head only" if heads else "")


def measure_seconds_per_image(network: OpalNetwork, images: TrainImages) -> float:
    """Return the seconds that the backbone takes per image in a forward pass."""
    device, config = next(network.eval().parameters()).device, network.config
    pixels = [torch.tensor(images[0, index][0][..., :3]) for index in range(min(_MEASURED, len(images)))]
    inputs = normalize(torch.stack(pixels).to(device), config.mean, config.std)
    with torch.no_grad():
        return _time(lambda: network.backbone(inputs)) / len(inputs)


def measure_seconds_per_step(network: OpalNetwork) -> float:
    """Return the seconds of a step of fitting the head, to random features of 64 images."""
    if not network.config.head.projection:
        return 0.0  # a dense layer on pooled features
    device, channels = next(network.parameters()).device, min(DIRECTIONS, network.backbone.num_features)
    head = OpalHead(channels, network.config.num_classes, network.config.head).to(device)
    features = torch.randn(BATCH, channels, *network.grid, device=device)

    def step() -> Tensor:
        total: Tensor = head(features).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    return _time(step)


def _time(call: Callable[[], Tensor]) -> float:
    """Return the seconds of the second of two calls; the first warms up."""
    call().sum().item()  # waits for the device
    started = time.perf_counter()
    call().sum().item()
    return time.perf_counter() - started


def _round(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
