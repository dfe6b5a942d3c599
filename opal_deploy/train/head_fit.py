"""The head fitted to features of the frozen backbone, before fine-tuning changes the backbone.

An untrained head distorts a pretrained backbone in its first steps. Fitting the head first avoids that (linear probing
before fine-tuning; Kumar et al., "Fine-tuning can distort pretrained features and underperform out-of-distribution",
ICLR 2022). It is cheap: the backbone sees each view of an image once (`compute_frozen_features`), and a step of the
head on features in memory takes milliseconds (`fit_head`). The OPAL head's projection is fitted in the features' main
directions (`Basis`): that is six times as fast as in a ResNet-18's 768 channels, and the slots find parts more often.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn import functional

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
# Adam's initial learning rate, for features whose root mean square is 1, and weight decay of slots
_RATE, _DECAY = 6e-3, 6e-3
# directions of a basis, and the images whose cells it is found from
DIRECTIONS, _BASIS_IMAGES = 256, 256
# share of the image's sides that its middle has
_MIDDLE = 0.7
# share of the cells that counts as the object: half of them reached from birds into their surroundings
_OBJECT = 0.25
# weight of a finer feature map beside the last one
_FINER = 1.4
_TINY = 1e-6
# features, pooled, labels, regions and positions of a batch, see `FrozenFeatures`
_Part = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]


@dataclass(frozen=True)
class Basis:
    """Coordinates of features along their main directions, per cell: (F - mean) @ directions.

    The directions are the first 256 principal components, or fewer. The first one points from the border of the images
    to their middle, since it tells objects from their background.
    """

    mean: Tensor  # float32 [D]
    directions: Tensor  # float32 [D, r]

    @staticmethod
    def find(features: Tensor, maps: Sequence[int], fabric: Fabric) -> Basis:
        """Return the basis of all processes' features, float32 [n, D, H, W].

        `maps` are the channels of the feature maps that they are stacked from; all are brought to the same root mean
        square, and finer ones to 1.4 times that of the last, since they tell better where.
        """
        blocks = torch.split(features, list(maps), dim=1)
        squares = machine.sum_over_processes(fabric, *(float(block.square().mean()) for block in blocks))
        weights = [_FINER] * (len(maps) - 1) + [1.0]
        scale = torch.cat([
            torch.full((size,), weight / max(math.sqrt(square / fabric.world_size), _TINY))
            for size, weight, square in zip(maps, weights, squares, strict=True)
        ])  # fmt: skip
        cells = features.movedim(1, -1).flatten(0, 2) * scale
        moments = torch.cat([cells.sum(0, keepdim=True), cells.T @ cells])
        sums: Any = fabric.all_reduce(moments.to(fabric.device), reduce_op="sum")
        (count,) = machine.sum_over_processes(fabric, len(cells))
        mean, *rows = sums.cpu().double() / count
        covariance = torch.stack(rows) - mean.outer(mean)
        variances, directions = torch.linalg.eigh(covariance)
        variances, directions = variances.flip(0)[:DIRECTIONS], directions.flip(1)[:, :DIRECTIONS]
        first = ((cells - mean.float()) @ directions[:, 0].float()).reshape(len(features), *features.shape[2:]).mean(0)
        rows, cols = (torch.linspace(-1, 1, size).abs() for size in first.shape)
        middle = torch.maximum(rows[:, None], cols) < _MIDDLE
        (towards,) = machine.sum_over_processes(fabric, float(first[middle].mean() - first[~middle].mean()))
        if towards < 0:
            directions[:, 0] *= -1
        # coordinates of mean square 1
        directions = directions / variances.mean().clamp_min(_TINY).sqrt()
        return Basis((mean / scale).float(), (directions * scale[:, None]).float())

    def measure(self, features: Tensor) -> Tensor:
        """Return the coordinates [n, r, H, W] of features [n, D, H, W]."""
        cells = (features.movedim(1, -1) - self.mean) @ self.directions
        return cells.movedim(-1, 1)

    def copy_slots(self, head: OpalHead, channels: Tensor, fitted: OpalHead) -> None:
        """Begin the slots of some channels of a head of coordinates where those of a head of features are."""
        old, new = ({name: weight.cpu().clone() for name, weight in one.state_dict().items()} for one in (head, fitted))
        weight = old["projection.weight"][channels, :, 0, 0]  # [k, D]
        new["projection.weight"][channels, :, 0, 0] = weight @ torch.linalg.pinv(self.directions).T
        new["projection.bias"][channels] = old["projection.bias"][channels] + weight @ self.mean
        fitted.load_state_dict(new)

    def set_projection(self, head: OpalHead, fitted: OpalHead) -> None:
        """Give a head of features the weights of one that was fitted to coordinates."""
        device = next(head.parameters()).device
        state = {name: weight.cpu() for name, weight in fitted.state_dict().items()}
        weight = state["projection.weight"][:, :, 0, 0] @ self.directions.T  # [K, D]
        state["projection.bias"] = state["projection.bias"] - weight @ self.mean
        state["projection.weight"] = weight[:, :, None, None]
        head.load_state_dict({name: weight.to(device) for name, weight in state.items()})


@dataclass(frozen=True)
class FrozenFeatures:
    """The frozen backbone's features of n views of this process's training images, in the CPU's memory."""

    features: Tensor  # float16 [n, r, H, W], coordinates along `basis`; without one, features, float32 [n, D, H, W]
    pooled: Tensor  # float32 [n, D], the features' means over the cells
    labels: Tensor  # int64 [n]
    # float16 [n, H, W], share of each cell kept off: the data set's regions, or the background; None for neither
    regions: Tensor | None
    positions: Tensor  # int64 [n], of the images in the data set's training images
    basis: Basis | None  # None for a head without projection
    views: int  # number of views of each image; the rows of one view of all images come first
    batches: int  # number of batches that all processes together draw in one pass
    images_per_second: float  # feature maps computed per second by this process

    def draw(self, size: int, among: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield features, labels and regions of `size` views without end, each of the rows `among` once per pass."""
        generator = torch.Generator().manual_seed(0)
        while True:
            order = among[torch.randperm(len(among), generator=generator)]
            for start in range(0, max(len(order) - size, 0) + 1, size):
                rows = order[start : start + size]
                yield self.features[rows], self.labels[rows], None if self.regions is None else self.regions[rows]


def compute_frozen_features(
    network: OpalNetwork, batches: Batches, fabric: Fabric, *,
    memory: int, foreground: bool, progress: Progress,
) -> FrozenFeatures:  # fmt: skip
    """Return the backbone's features of as many of the three views of the training images as fit into memory.

    Where not even one view of all images fits, a random part of the images is taken. The network is left in evaluation
    mode.

    Args:
        batches: this process's share of the training images, shuffled, in batches of `BATCH`.
        memory: bytes that all processes of this machine together may keep.
        foreground: whether slots are kept on the object, found in the features, where the data set has no regions.
    """
    network.eval()
    # without augmentation all views would be the same
    wanted = VIEWS if batches.images.augmentation is not None else VIEWS[:1]
    share, per_view = sum(map(len, batches.local_plan())), len(batches.plan())
    channels = network.backbone.num_features
    number_bytes = 2 * min(channels, DIRECTIONS) if network.config.head.projection else 4 * channels
    room = memory // machine.local_processes() // (number_bytes * math.prod(network.grid))
    # with numbers of steps of their own, processes would wait for each other
    num_views = min(machine.gather(fabric, min(len(wanted), room // share)))
    if not num_views:
        num_views, per_view = 1, min(machine.gather(fabric, max(room // math.ceil(BATCH / fabric.world_size), 1)))
    began = time.perf_counter()
    batches_of_views = _compute_views(network, batches, fabric, wanted[:num_views], per_view, progress)
    first, basis = list[_Part](), None
    if network.config.head.projection:
        first = list(itertools.islice(batches_of_views, min(math.ceil(_BASIS_IMAGES / BATCH), per_view)))
        basis = Basis.find(torch.cat([features for features, *_ in first]), network.backbone.maps, fabric)
    # filled in place, since joining parts would take twice the memory
    rows, done = num_views * sum(map(len, batches.local_plan()[:per_view])), 0
    kept: list[Any] = []
    for features, *others in itertools.chain((first.pop(0) for _ in range(len(first))), batches_of_views):
        parts = (features if basis is None else basis.measure(features).half(), *others)
        kept = kept or [None if part is None else part.new_empty(rows, *part.shape[1:]) for part in parts]
        for whole, part in zip(kept, parts, strict=True):
            if whole is not None and part is not None:
                whole[done : done + len(part)] = part
        done += len(features)
    whole_features, pooled, labels, regions, positions = kept
    if foreground and regions is None and basis is not None:
        regions = torch.cat([find_background(part.float()) for part in whole_features.split(BATCH)]).half()
    counts = num_views, num_views * per_view, done / (time.perf_counter() - began)
    return FrozenFeatures(whole_features, pooled, labels, regions, positions, basis, *counts)


def find_background(coordinates: Tensor) -> Tensor:
    """Return which cells are not of the object, bool [n, H, W], for coordinates [n, r, H, W] along a basis.

    The object is the quarter of the cells with the largest features, on the side that the middle of the images is on.
    """
    strength: Tensor = coordinates.norm(dim=1) * (coordinates[:, 0] > 0)
    least = strength.flatten(1).quantile(1 - _OBJECT, dim=1)
    return strength <= least[:, None, None]


def _compute_views(
    network: OpalNetwork, batches: Batches, fabric: Fabric, views: Sequence[int], per_view: int, progress: Progress
) -> Iterator[_Part]:
    """Yield features, their means over cells, labels, regions and positions of so many batches of each view."""
    config, device = network.config, next(network.parameters()).device
    done, total = 0, len(views) * sum(map(len, batches.local_plan()[:per_view]))
    for view in views:
        batches.epoch = view
        for keys, (pixels, labels) in zip(batches.local_plan()[:per_view], batches, strict=False):
            images = pixels.to(device, non_blocking=True)
            with torch.no_grad(), fabric.autocast():
                features = network.backbone(normalize(images[..., :3], config.mean, config.std)).float().cpu()
            regions = read_regions_channel(images)
            if regions is not None:
                regions = functional.adaptive_avg_pool2d(regions[:, None], network.grid)[:, 0].half().cpu()
            done += len(labels)
            progress(done, total, "computing features of the frozen network")
            yield features, features.mean((2, 3)), labels, regions, torch.tensor([key[1] for key in keys])


def fit_head(
    head: OpalHead, frozen: FrozenFeatures, objective: Objective, fabric: Fabric, *,
    steps: int, progress: Progress, among: Tensor | None = None, note: str = "fitting the head",
) -> tuple[float, float]:  # fmt: skip
    """Fit a head to features in memory; return mean loss in nats and accuracy, 0 ... 1, of the last tenth of the steps.

    Adam, at a learning rate that falls along a cosine. At least 20 passes over the features are made, whatever `steps`.
    The head, of the features or coordinates, computes in float32, and is left in evaluation mode. It is fitted to the
    rows `among` the features, int64, or to all.
    """
    head.train()
    model = HeadTerms(head, fitting=True, apart=objective.apart > 0).to(fabric.device)
    rows = torch.arange(len(frozen.labels)) if among is None else among
    steps = max(steps, round(frozen.batches * len(rows) / len(frozen.labels)) * LEAST_PASSES)
    parameters = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=_RATE, weight_decay=_DECAY if model.fitting else 0.0)
    totals = torch.zeros(3, dtype=torch.float64)
    batches = itertools.islice(frozen.draw(BATCH // fabric.world_size, rows), steps)
    for step, (features, labels, regions) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = _RATE * (1 + math.cos(math.pi * step / steps)) / 2
        labels = labels.to(fabric.device)
        regions = None if regions is None else regions.to(fabric.device).float()
        terms = model(features.to(fabric.device).float(), labels, regions)
        total, cross_entropy = objective(terms, labels)
        optimizer.zero_grad(set_to_none=True)
        (total / len(labels)).backward()  # type: ignore[no-untyped-call]
        machine.average_gradients(fabric, parameters)
        optimizer.step()
        if step >= steps - max(steps // 10, 1):
            correct = (terms.logits.argmax(1) == labels).sum()
            totals += torch.tensor([float(cross_entropy), float(correct), len(labels)], dtype=torch.float64)
        progress(step + 1, steps, note)
    head.eval()
    loss, correct_sum, seen = machine.sum_over_processes(fabric, *totals.tolist())
    return loss / seen, correct_sum / seen
