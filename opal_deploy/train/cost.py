"""The time that a training run will take, measured on its first images before the first step."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.model.backbones import is_transformer
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.head_fit import BATCH, LEAST_PASSES, VIEWS
from opal_deploy.train.images import TrainImages, normalize
from opal_deploy.train.losses import HeadTerms
from opal_deploy.train.network import build_network, is_finer
from opal_deploy.train.options import TrainOptions

# a training step costs about three forward passes
PASSES = 3
# images of the batch that is timed
_MEASURED = 16


def describe_cost(
    network: OpalNetwork, choices: list[TrainOptions], data: DataSet, images: TrainImages, processes: int, *, fits: bool
) -> str:
    """Return a line on images and estimated times, and what `--stride 16` and `--epochs 0` would save.

    `network` is that of the first of `choices`, the run's options with one per stride that is compared; `fits` says
    whether the head is fitted first.
    """
    options, device = choices[0], next(network.parameters()).device
    counts = ((data.train, "training"), (data.val, "validation"), (data.test, "test"))
    train, val = (len(samples) / processes for samples in (data.train, data.val))
    # mirror images double the work of a step, attacked images triple it
    forwards = PASSES * (1 + (options.agreement > 0) + 2 * (options.adversarial > 0)) * train + val
    views = (1 if images.augmentation is None else len(VIEWS)) * (1 + (options.agreement > 0))
    steps = max(options.head_steps, views * math.ceil(train / BATCH) * LEAST_PASSES)

    def measure(choice: TrainOptions) -> tuple[float, float]:
        return measure_speed(build_network(choice, data.num_classes, None).to(device), images)

    speeds = [measure_speed(network, images), *(measure(choice) for choice in choices[1:])]
    fitting = [(views * train + val) * image + steps * step for image, step in speeds] if fits else []
    epoch, epochs = forwards * max(image for image, _ in speeds), options.epochs or 0
    parts = [
        ", ".join(f"{len(samples):,} {name}" for samples, name in counts if samples) + " images",
        f"about {_round(sum(fitting) + epochs * epoch)} here: " + ", ".join(
            [f"{_round(sum(fitting))} for the head's fit{' at two strides' * (len(choices) > 1)}"] * fits
            + [f"{_round(epoch)} per epoch"]
        ),
    ]  # fmt: skip
    if len(fitting) > 1:
        parts.append(f"--stride {options.stride} saves {_round(fitting[1])} of the fit")
    elif (
        options.head_config.evidence == "exact"
        and options.stride is None
        and not is_transformer(options.backbone)
        and is_finer(16, options)
    ):
        saved = epoch - forwards * measure(replace(options, stride=16))[0]
        parts += [f"--stride 16 saves {_round(saved)} per epoch"] * (saved > 0.05 * epoch)
    return "; ".join(parts + [f"--epochs 0 saves {_round(epochs * epoch)}"] * (fits and epochs > 0))


def measure_speed(network: OpalNetwork, images: TrainImages) -> tuple[float, float]:
    """Return the seconds of a forward pass of the backbone per image, and those of a step of fitting the head."""
    items = [images[0, index] for index in range(min(_MEASURED, len(images)))]
    if errors := [item for item in items if isinstance(item, UsageError)]:
        raise errors[0]
    device, config = next(network.parameters()).device, network.config
    pixels = torch.stack([torch.tensor(item[0][..., :3]) for item in items if not isinstance(item, UsageError)])
    inputs = normalize(pixels.to(device), config.mean, config.std)
    labels = torch.zeros(BATCH, dtype=torch.int64, device=device)
    terms = HeadTerms(network.eval().head, agreement=False).to(device)
    weights = [weight for weight in network.head.parameters() if weight.requires_grad]
    image = step = 0.0
    # the first round warms up; reading a number waits for the device
    for _ in range(2):
        started = time.perf_counter()
        with torch.no_grad():
            features = network.backbone(inputs)
        features.sum().item()
        image = (time.perf_counter() - started) / len(items)
        features = features.repeat(-(-BATCH // len(items)), 1, 1, 1)[:BATCH]
        started = time.perf_counter()
        total = terms(features, labels, None).logits.sum()
        torch.autograd.grad(total, weights, allow_unused=True)[0]
        total.item()
        step = time.perf_counter() - started
    return image, step


def _round(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
