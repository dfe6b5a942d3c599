"""The head fitted to features of the frozen backbone, before fine-tuning changes the backbone; and the stride.

An untrained head distorts a pretrained backbone in its first steps. Fitting the head first avoids that (linear probing
before fine-tuning; Kumar et al., "Fine-tuning can distort pretrained features and underperform out-of-distribution",
ICLR 2022). It is cheap: the backbone sees each view of an image once, and a step of the head takes milliseconds.
Features are kept in memory. If not even one view of all images fits, every step computes its own images' features.

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

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn import functional

from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.logs import Progress
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import machine
from opal_deploy.train.images import MIRRORED, WHOLE, Batches, normalize
from opal_deploy.train.losses import HeadTerms, Objective, read_regions_channel

# views of each training image, by their epochs: the features of a frozen network suffer from the strong augmentation
VIEWS = (WHOLE, MIRRORED, 1)
# images per step, over all processes
BATCH = 64
# over features in memory: with 5 passes the head answered 78 % of 100 species, with 21 as much as a linear classifier
LEAST_PASSES = 20
# Adam's initial learning rate, measured on features whose root mean square was within these bounds
_RATE, _RMS_BOUNDS = 3e-3, (0.2, 2.0)
# features above this would lose too much in float16, whose largest number is 65,504
_MAX_HALF = 1e4
# pooled features that a linear classifier is fitted to, and the inverse of its regularisation
_MAX_POOLED, _LINEAR_C = 20_000, 0.01
_TINY = 1e-6
# of a one-sided test at 5 %
_Z = 1.645

# features float16 or float32 [n, views, D, H, W], with mirror agreement of each image and its mirror image; labels
# int64 [n]; and the share of each cell that is kept off, float16 [n, H, W], or None without regions; all on the CPU
Features = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class HeadFit:
    """The outcome of fitting a head.

    Attributes:
        loss: mean training loss of the last tenth of the steps, in nats.
        accuracy: of the same steps, 0 ... 1.
        images_per_second: feature maps computed per second, by all processes together.
        pooled: float32 [M, D], features averaged over cells, of up to 20,000 of this process's images.
        labels: int64 [M].
    """

    loss: float
    accuracy: float
    images_per_second: float
    pooled: Tensor
    labels: Tensor


def fit_head(
    network: OpalNetwork,
    batches: Batches,
    objective: Objective,
    fabric: Fabric,
    *,
    steps: int,
    memory: int,
    progress: Progress,
) -> HeadFit:
    """Fit the head to the features of the backbone, which stays unchanged; return the outcome.

    Adam, at a learning rate that falls along a cosine; it is larger for very small features and smaller for large ones.
    At least 20 passes over features in memory are made, else one, whatever `steps`. The head computes in float32.

    Args:
        network: left in evaluation mode.
        batches: this process's share of the training images, in batches of `BATCH`.
        objective: the loss, which fine-tuning uses too.
        fabric: the processes of the run, and the precision of the backbone.
        memory: bytes that all processes of this machine together may keep.
    """
    network.eval().head.train()
    model = HeadTerms(network.head, agreement=objective.agreement > 0).to(fabric.device)
    passes = _FeaturePasses(network, batches, fabric, mirror=objective.agreement > 0)
    kept, views = passes.keep(memory // machine.local_processes(), progress)
    size = BATCH // fabric.world_size
    source = passes.stream() if kept is None else _draw(kept, size)
    steps = max(steps, views * len(batches.plan()) * (1 if kept is None else LEAST_PASSES))
    parameters = [weight for weight in network.head.parameters() if weight.requires_grad]
    rate = _RATE * min(max(passes.rms, _RMS_BOUNDS[0]), _RMS_BOUNDS[1]) / passes.rms
    optimizer = torch.optim.Adam(parameters, lr=rate)
    totals = torch.zeros(3, dtype=torch.float64)
    for step, (features, labels, regions) in enumerate(itertools.islice(source, steps)):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        labels = labels.to(fabric.device)
        # first all images, then their mirror images
        features = features.transpose(0, 1).flatten(0, 1).to(fabric.device).float()
        terms = model(features, labels, None if regions is None else regions.to(fabric.device).float())
        total, cross_entropy = objective(terms, labels)
        optimizer.zero_grad(set_to_none=True)
        (total / len(labels)).backward()  # type: ignore[no-untyped-call]
        machine.average_gradients(fabric, parameters)
        optimizer.step()
        if step >= steps - max(steps // 10, 1):
            correct = (terms.logits[: len(labels)].argmax(1) == labels).sum()
            totals += torch.tensor([float(cross_entropy), float(correct), len(labels)], dtype=torch.float64)
        progress(step + 1, steps, "fitting the head")
    network.eval()
    speed = passes.images / passes.seconds
    loss, correct_sum, seen, speed = machine.sum_over_processes(fabric, *totals.tolist(), speed)
    pooled, pooled_labels = (torch.cat(column) for column in zip(*passes.pooled, strict=True))
    return HeadFit(loss / seen, correct_sum / seen, speed, pooled, pooled_labels)


class _FeaturePasses:
    """Passes over the training images that compute their features.

    Attributes:
        rms: root mean square of the features of the first batch, averaged over the processes.
        images, seconds: number of feature maps computed so far, and how long that took.
        pooled: pooled features and labels of up to 20,000 images.
    """

    def __init__(self, network: OpalNetwork, batches: Batches, fabric: Fabric, *, mirror: bool) -> None:
        self._network, self._batches, self._fabric, self._mirror = network, batches, fabric, mirror
        self.rms, self.images, self.seconds = 1.0, 0, 0.0
        self.pooled: list[tuple[Tensor, Tensor]] = []
        self._first: Iterator[Features] = iter(())

    def keep(self, memory: int, progress: Progress) -> tuple[Features | None, int]:
        """Return the features of as many views as fit into `memory` bytes of every process, and their number.

        Without room for one view the features are None, and the number is 1.
        """
        # without augmentation all views would be the same
        wanted = VIEWS if self._batches.images.augmentation is not None else VIEWS[:1]
        stream = self._compute_pass(wanted[0])
        first = next(stream)
        share = sum(map(len, self._batches.local_plan()))
        rms, fitting = float(first[0].float().pow(2).mean().sqrt()), memory // (share * first[0][0].nbytes)
        # with rates or numbers of steps of their own, processes would end with different heads, or wait for each other
        all_rms, all_fitting = zip(*machine.gather(self._fabric, (rms, fitting)), strict=True)
        self.rms, views = max(fmean(all_rms), _TINY), min(len(wanted), *all_fitting)
        self._first = itertools.chain([first], stream)
        if not views:
            return None, 1
        # filled in place, since joining parts would take twice the memory
        kept = tuple(part if part is None else part.new_empty(views * share, *part.shape[1:]) for part in first)
        done = 0
        for view in wanted[:views]:
            for batch in self._first if view == wanted[0] else self._compute_pass(view):
                for whole, part in zip(kept, batch, strict=True):
                    if whole is not None and part is not None:
                        whole[done : done + len(part)] = part
                done += len(batch[1])
                progress(done, views * share, "computing features of the frozen network")
        return kept, views  # type: ignore[return-value]

    def stream(self) -> Iterator[Features]:
        """Yield the features of every image once per view, without end; begins with the pass that `keep` began."""
        yield from self._first
        views = itertools.chain.from_iterable((WHOLE, MIRRORED, epoch) for epoch in itertools.count(1))
        for view in itertools.islice(views, 1, None):
            yield from self._compute_pass(view)

    def _compute_pass(self, epoch: int) -> Iterator[Features]:
        self._batches.epoch = epoch
        started = time.perf_counter()
        for images, labels in self._batches:
            features, regions = compute_features(self._network, images, self._fabric, mirror=self._mirror)
            self.images += len(labels)
            self.seconds += time.perf_counter() - started
            if self.images <= _MAX_POOLED:
                self.pooled.append((_pool(features), labels))
            yield features, labels, regions
            started = time.perf_counter()


def _draw(kept: Features, size: int) -> Iterator[Features]:
    """Yield batches of features in memory without end, every image once per pass."""
    features, labels, regions = kept
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, max(len(labels) - size, 0) + 1, size):
            rows = order[start : start + size]
            yield features[rows], labels[rows], None if regions is None else regions[rows]


def _pool(features: Tensor) -> Tensor:
    """Return the features of the images themselves, averaged over the cells: float32 [n, D]."""
    return features[:, 0].float().mean((2, 3))


def compute_features(
    network: OpalNetwork, images: Tensor, fabric: Fabric | None = None, *, mirror: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the features and the regions of uint8 images [n, H0, W0, 3 or 4]; see `Features`.

    The backbone, in evaluation mode, computes in Fabric's precision, in float32 without.
    """
    config, device = network.config, next(network.parameters()).device
    images = images.to(device, non_blocking=True)
    inputs = normalize(images[..., :3], config.mean, config.std)
    with torch.no_grad(), machine.autocast(fabric):
        views = [network.backbone(view) for view in ([inputs, inputs.flip(3)] if mirror else [inputs])]
    features = torch.stack(views, dim=1).float().cpu()
    if features.abs().max() < _MAX_HALF:
        features = features.half()
    regions = read_regions_channel(images)
    if regions is not None:
        height, width = features.shape[3:]
        regions = functional.adaptive_avg_pool2d(regions[:, None], (height, width))[:, 0].half().cpu()
    return features, regions


def measure_linear(fit: HeadFit, network: OpalNetwork, batches: Batches, progress: Progress) -> float:
    """Return the accuracy on `batches` of a linear classifier of the pooled features, 0 ... 1.

    This is the accuracy of the same features without explanations: multinomial logistic regression on standardised
    features. Expects the backbone that the head was fitted to.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=_LINEAR_C, max_iter=200))
    classifier.fit(fit.pooled.numpy(), fit.labels.numpy())
    correct = done = 0
    for images, labels in batches:
        pooled = _pool(compute_features(network, images)[0])
        correct += int((classifier.predict(pooled.numpy()) == labels.numpy()).sum())
        done += len(labels)
        progress(done, len(batches.images), "evaluating a linear classifier")
    return correct / done


def prefer_all_layers(finer: Evaluation, all_layers: Evaluation) -> bool:
    """Return whether all layers classify clearly more validation images correctly than the network with finer cells."""
    mean = (finer.accuracy + all_layers.accuracy) / 2
    # a test for two different sets of images: on the same images it is strict
    clear = _Z * math.sqrt(2 * mean * (1 - mean) / finer.images)
    return all_layers.accuracy - finer.accuracy > clear
