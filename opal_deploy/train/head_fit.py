"""The head fitted to features of the frozen backbone, before fine-tuning changes the backbone; and the stride.

An untrained head distorts a pretrained backbone in its first steps. Fitting the head first avoids that (linear probing
before fine-tuning; Kumar et al., "Fine-tuning can distort pretrained features and underperform out-of-distribution",
ICLR 2022). It is cheap: the backbone sees each view of an image once (`compute_frozen_features`), and a step of the
head on features in memory takes milliseconds (`fit_head`).

Finer cells locate evidence more exactly. They cost the layers after the cut, which some classes need: ImageNet's last
layers know breeds of dogs. So a recipe can fit the head to both frozen networks, and finer cells stay unless all layers
classify clearly more validation images correctly.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn import functional

from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.logs import Progress
from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import machine
from opal_deploy.train.images import MIRRORED, WHOLE, Batches, normalize
from opal_deploy.train.losses import HeadTerms, Objective, read_regions_channel

# views of each training image, by their epochs: the features of a frozen network suffer from the strong augmentation
VIEWS = (WHOLE, MIRRORED, 1)
# images per step, over all processes
BATCH = 64
# with 5 passes the head answered 78 % of 100 species, with 21 as much as a linear classifier
LEAST_PASSES = 20
# Adam's initial learning rate, measured on features whose root mean square was within these bounds
_RATE, _RMS_BOUNDS = 3e-3, (0.2, 2.0)
# features above this would lose too much in float16, whose largest number is 65,504
_MAX_HALF = 1e4
_TINY = 1e-6
# of a one-sided test at 5 %
_Z = 1.645


@dataclass(frozen=True)
class FrozenFeatures:
    """The frozen backbone's features of views of this process's training images, in the CPU's memory.

    Attributes:
        features: float16 or float32 [n, D, H, W].
        labels: int64 [n].
        regions: share of each cell that is kept off, float16 [n, H, W]; None without regions.
        batches: number of batches that all processes together draw in one pass.
        rms: root mean square of the first batch's features, averaged over the processes.
        images_per_second: feature maps computed per second by this process.
    """

    features: Tensor
    labels: Tensor
    regions: Tensor | None
    batches: int
    rms: float
    images_per_second: float

    def draw(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield features, labels and regions of `size` views without end, every view once per pass."""
        generator = torch.Generator().manual_seed(0)
        while True:
            order = torch.randperm(len(self.labels), generator=generator)
            for start in range(0, max(len(order) - size, 0) + 1, size):
                rows = order[start : start + size]
                yield self.features[rows], self.labels[rows], None if self.regions is None else self.regions[rows]


def compute_frozen_features(
    network: OpalNetwork, batches: Batches, fabric: Fabric, *, memory: int, progress: Progress
) -> FrozenFeatures:
    """Return the backbone's features of as many views of the training images as fit into memory.

    Where not even one view of all images fits, a random part of the images is taken.

    Args:
        network: left in evaluation mode.
        batches: this process's share of the training images, shuffled, in batches of `BATCH`.
        fabric: the processes of the run, and the precision of the backbone.
        memory: bytes that all processes of this machine together may keep, in float16.
        progress: called with views done.
    """
    network.eval()
    # without augmentation all views would be the same
    wanted = VIEWS if batches.images.augmentation is not None else VIEWS[:1]
    share = sum(map(len, batches.local_plan()))
    height, width = network.grid
    view_bytes = 2 * network.backbone.num_features * height * width
    room = memory // machine.local_processes() // view_bytes
    # with numbers of steps of their own, processes would wait for each other
    num_views = min(machine.gather(fabric, min(len(wanted), room // share)))
    per_view = len(batches.plan())
    if not num_views:
        num_views, per_view = 1, min(machine.gather(fabric, max(room // math.ceil(BATCH / fabric.world_size), 1)))
    kept: list[Any] = []
    done, rms, began = 0, 1.0, time.perf_counter()
    for view in wanted[:num_views]:
        batches.epoch = view
        for images, labels in itertools.islice(batches, per_view):
            features, regions = compute_features(network, images, fabric)
            if not kept:
                rms = fmean(machine.gather(fabric, float(features.float().pow(2).mean().sqrt())))
                # filled in place, since joining parts would take twice the memory
                rows = num_views * min(share, per_view * 2 * BATCH)
                parts = (features, labels, regions)
                kept = [None if part is None else part.new_empty(rows, *part.shape[1:]) for part in parts]
            for whole, part in zip(kept, (features, labels, regions), strict=True):
                if whole is not None and part is not None:
                    whole[done : done + len(part)] = part
            done += len(labels)
            progress(done, len(wanted) * share, "computing features of the frozen network")
    kept = [None if whole is None else whole[:done] for whole in kept]
    speed = done / (time.perf_counter() - began)
    return FrozenFeatures(kept[0], kept[1], kept[2], num_views * per_view, max(rms, _TINY), speed)


def fit_head(
    head: OpalHead, frozen: FrozenFeatures, objective: Objective, fabric: Fabric, *, steps: int, progress: Progress
) -> tuple[float, float]:
    """Fit a head to features in memory; return mean loss in nats and accuracy, 0 ... 1, of the last tenth of the steps.

    Adam, at a learning rate that falls along a cosine; it is larger for very small features and smaller for large ones.
    At least 20 passes over the features are made, whatever `steps`. The head computes in float32.

    Args:
        head: on the run's device; left in evaluation mode.
        frozen: the features.
        objective: the loss, which fine-tuning uses too.
        fabric: the processes of the run.
        steps: of Adam.
        progress: called with steps done.
    """
    head.train()
    model = HeadTerms(head).to(fabric.device)
    steps = max(steps, frozen.batches * LEAST_PASSES)
    parameters = [weight for weight in head.parameters() if weight.requires_grad]
    rate = _RATE * min(max(frozen.rms, _RMS_BOUNDS[0]), _RMS_BOUNDS[1]) / frozen.rms
    optimizer = torch.optim.Adam(parameters, lr=rate)
    totals = torch.zeros(3, dtype=torch.float64)
    for step, (features, labels, regions) in enumerate(
        itertools.islice(frozen.draw(BATCH // fabric.world_size), steps)
    ):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        labels = labels.to(fabric.device)
        terms = model(
            features.to(fabric.device).float(), labels, None if regions is None else regions.to(fabric.device).float()
        )
        total, cross_entropy = objective(terms, labels)
        optimizer.zero_grad(set_to_none=True)
        (total / len(labels)).backward()  # type: ignore[no-untyped-call]
        machine.average_gradients(fabric, parameters)
        optimizer.step()
        if step >= steps - max(steps // 10, 1):
            correct = (terms.logits.argmax(1) == labels).sum()
            totals += torch.tensor([float(cross_entropy), float(correct), len(labels)], dtype=torch.float64)
        progress(step + 1, steps, "fitting the head")
    head.eval()
    loss, correct_sum, seen = machine.sum_over_processes(fabric, *totals.tolist())
    return loss / seen, correct_sum / seen


def compute_features(network: OpalNetwork, images: Tensor, fabric: Fabric) -> tuple[Tensor, Tensor | None]:
    """Return the features and the regions of uint8 images [n, H0, W0, 3 or 4]; see `FrozenFeatures`.

    The backbone, in evaluation mode, computes in Fabric's precision.
    """
    config, device = network.config, next(network.parameters()).device
    images = images.to(device, non_blocking=True)
    inputs = normalize(images[..., :3], config.mean, config.std)
    with torch.no_grad(), machine.autocast(fabric):
        features = network.backbone(inputs).float().cpu()
    if features.abs().max() < _MAX_HALF:
        features = features.half()
    regions = read_regions_channel(images)
    if regions is not None:
        height, width = features.shape[2:]
        regions = functional.adaptive_avg_pool2d(regions[:, None], (height, width))[:, 0].half().cpu()
    return features, regions


def prefer_all_layers(finer: Evaluation, all_layers: Evaluation) -> bool:
    """Return whether all layers classify clearly more validation images correctly than the network with finer cells."""
    mean = (finer.accuracy + all_layers.accuracy) / 2
    # a test for two different sets of images: on the same images it is strict
    clear = _Z * math.sqrt(2 * mean * (1 - mean) / finer.images)
    return all_layers.accuracy - finer.accuracy > clear
