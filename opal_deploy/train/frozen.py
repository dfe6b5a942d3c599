"""The head fitted to features of the frozen backbone, before fine-tuning changes the backbone.

An untrained head distorts a pretrained backbone in its first steps. Fitting the head first avoids that (linear probing
before fine-tuning; Kumar et al., "Fine-tuning can distort pretrained features and underperform out-of-distribution",
ICLR 2022). It is cheap: the backbone sees each view of an image once, and a step of the head takes milliseconds.

Features are kept in memory. If not even one view of all images fits, every step computes its own images' features.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opal_deploy.logs import Progress
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.attention import HeadTerms
from opal_deploy.train.epoch import Objective, read_regions_channel
from opal_deploy.train.images import MIRRORED, WHOLE, Batches, normalize
from opal_deploy.train.machine import MixedPrecision, ProcessGroup

# views of each training image, by their epochs: the features of a frozen network suffer from the strong augmentation
_VIEWS = (WHOLE, MIRRORED, 1)
# images per step, over all processes
BATCH = 64
# over features in memory: with 5 passes the head answered 78 % of 100 species, with 21 as much as a linear classifier
_LEAST_PASSES = 20
# Adam's initial learning rate, measured on features whose root mean square was within these bounds
_RATE, _RMS_BOUNDS = 3e-3, (0.2, 2.0)
# features above this would lose too much in float16, whose largest number is 65,504
_MAX_HALF = 1e4
# pooled features that a linear classifier is fitted to, and the inverse of its regularisation
_MAX_POOLED, _LINEAR_C = 20_000, 0.01
_TINY = 1e-6


class _Features(NamedTuple):
    """Features of n images, on the CPU.

    Attributes:
        features: float16 or float32 [n, views, D, H, W]; with mirror agreement each image and its mirror image.
        labels: int64 [n].
        regions: share of each cell that is kept off, float16 [n, H, W]; None without regions.
    """

    features: Tensor
    labels: Tensor
    regions: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> _Features:
        """Return the results of a function of each tensor."""
        return _Features(
            function(self.features), function(self.labels), None if self.regions is None else function(self.regions)
        )

    def pooled(self) -> Tensor:
        """Return the features of the images themselves, averaged over the cells: float32 [n, D]."""
        return self.features[:, 0].float().mean((2, 3))


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

    def linear_accuracy(self, network: OpalNetwork, batches: Batches, progress: Progress) -> float:
        """Return the accuracy on `batches` of a linear classifier of the pooled features, 0 ... 1.

        This is the accuracy of the same features without explanations: multinomial logistic regression on standardised
        features. Expects the backbone that the head was fitted to.
        """
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=_LINEAR_C, max_iter=200))
        classifier.fit(self.pooled.numpy(), self.labels.numpy())
        correct = done = 0
        for images, labels in batches:
            pooled = _compute(network, images, labels, MixedPrecision("cpu", None), mirror=False).pooled()
            correct += int((classifier.predict(pooled.numpy()) == labels.numpy()).sum())
            done += len(labels)
            progress(done, len(batches.images), "evaluating a linear classifier")
        return correct / done


def fit_head(
    network: OpalNetwork,
    batches: Batches,
    objective: Objective,
    group: ProcessGroup,
    amp: MixedPrecision,
    *,
    steps: int,
    memory: int,
    progress: Progress,
) -> HeadFit:
    """Fit the head to the features of the backbone, which stays unchanged; return the outcome.

    Adam, at a learning rate that falls along a cosine; it is larger for very small features and smaller for large ones.
    At least 20 passes over features in memory are made, else one, whatever `steps`.

    Args:
        network: left in evaluation mode.
        batches: this process's share of the training images, in batches of `BATCH`.
        objective: the loss, which fine-tuning uses too.
        group: the processes of the run; gradients are averaged over them.
        amp: precision of the backbone.
        memory: bytes that all processes of this machine together may keep.
        progress: called with steps done, all steps and a note.

    Raises:
        UsageError: an image cannot be decoded.
    """
    network.eval().head.train()
    model = group.wrap_ddp(HeadTerms(network.head, agreement=objective.agreement > 0))
    source = _FeatureSource(network, batches, amp, objective.agreement > 0)
    source.keep(memory // group.local_size, group, progress)
    steps = max(steps, source.views * len(batches.plan()) * (_LEAST_PASSES if source.is_kept else 1))
    parameters = [each for each in network.head.parameters() if each.requires_grad]
    rate = _RATE * min(max(source.rms, _RMS_BOUNDS[0]), _RMS_BOUNDS[1]) / source.rms
    optimizer = torch.optim.Adam(parameters, lr=rate)
    totals = torch.zeros(3, dtype=torch.float64)
    for step, batch in enumerate(itertools.islice(source.batches(BATCH // group.size), steps)):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        labels = batch.labels.to(group.device)
        # first all images, then their mirror images
        features = batch.features.transpose(0, 1).flatten(0, 1).to(group.device).float()
        terms = model(features, labels, None if batch.regions is None else batch.regions.to(group.device).float())
        total, cross_entropy = objective(terms, labels)
        optimizer.zero_grad(set_to_none=True)
        (total / len(labels)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step >= steps - max(steps // 10, 1):
            correct = (terms.logits[: len(labels)].argmax(1) == labels).sum()
            totals += torch.tensor([float(cross_entropy), float(correct), len(labels)], dtype=torch.float64)
        progress(step + 1, steps, "fitting the head")
    network.eval()
    loss, correct_sum, seen, speed = group.all_reduce_sum(*totals.tolist(), source.images / source.seconds)
    pooled, pooled_labels = (torch.cat(each) for each in zip(*source.pooled, strict=True))
    return HeadFit(loss / seen, correct_sum / seen, speed, pooled, pooled_labels)


class _FeatureSource:
    """Features of training images, kept in memory or computed for each batch.

    Attributes:
        views: views per image that are kept; 1 where none is.
        rms: root mean square of the features of the first batch, averaged over the processes.
        images, seconds: number of feature maps computed so far, and how long that took.
        pooled: pooled features and labels of up to 20,000 images.
    """

    def __init__(self, network: OpalNetwork, batches: Batches, amp: MixedPrecision, mirror: bool) -> None:
        self._network, self._batches, self._amp, self._mirror = network, batches, amp, mirror
        self._kept: _Features | None = None
        self._first_pass: Iterator[_Features] = iter(())
        self.views, self.rms, self.images, self.seconds = 1, 1.0, 0, 0.0
        self.pooled: list[tuple[Tensor, Tensor]] = []

    @property
    def is_kept(self) -> bool:
        """Whether the features are in memory."""
        return self._kept is not None

    def keep(self, memory: int, group: ProcessGroup, progress: Progress) -> None:
        """Keep the features of as many views as fit into `memory` bytes of every process, perhaps of none."""
        # without augmentation all views would be the same
        wanted = _VIEWS if self._batches.images.augmentation is not None else _VIEWS[:1]
        stream = self._compute_pass(wanted[0])
        first = next(stream)
        share = sum(map(len, self._batches.local_plan()))
        rms, fitting = float(first.features.float().pow(2).mean().sqrt()), memory // (share * first.features[0].nbytes)
        # with rates or numbers of steps of their own, processes would end with different heads, or wait for each other
        all_rms, all_fitting = zip(*group.all_gather((rms, fitting)), strict=True)
        self.rms, views = max(fmean(all_rms), _TINY), min(len(wanted), *all_fitting)
        self._first_pass = itertools.chain([first], stream)
        if not views:
            return
        # filled in place, since joining parts would take twice the memory
        kept = first.map(lambda each: each.new_empty(views * share, *each.shape[1:]))
        done = 0
        for view in wanted[:views]:
            for part in self._first_pass if view == wanted[0] else self._compute_pass(view):
                for whole, each in zip(kept, part, strict=True):
                    if whole is not None and each is not None:
                        whole[done : done + len(each)] = each
                done += len(part.labels)
                progress(done, views * share, "computing features of the frozen network")
        self.views, self._kept = views, kept

    def batches(self, size: int) -> Iterator[_Features]:
        """Yield batches without end, every image once per pass."""
        if self._kept is None:
            yield from self._first_pass
            views = itertools.chain.from_iterable((WHOLE, MIRRORED, epoch) for epoch in itertools.count(1))
            for view in itertools.islice(views, 1, None):
                yield from self._compute_pass(view)
            return
        count = len(self._kept.labels)
        generator = torch.Generator().manual_seed(0)
        while True:
            order = torch.randperm(count, generator=generator)
            for start in range(0, max(count - size, 0) + 1, size):
                rows = order[start : start + size]
                yield self._kept.map(operator.itemgetter(rows))

    def _compute_pass(self, epoch: int) -> Iterator[_Features]:
        self._batches.epoch, self._batches.first_step = epoch, 0
        started = time.perf_counter()
        for images, labels in self._batches:
            part = _compute(self._network, images, labels, self._amp, mirror=self._mirror)
            self.images += len(labels)
            self.seconds += time.perf_counter() - started
            if self.images <= _MAX_POOLED:
                self.pooled.append((part.pooled(), labels))
            yield part
            started = time.perf_counter()


def _compute(network: OpalNetwork, images: Tensor, labels: Tensor, amp: MixedPrecision, *, mirror: bool) -> _Features:
    """Return the features of uint8 images [n, H0, W0, 3], or of 4 channels with regions."""
    config, device = network.config, next(network.parameters()).device
    images = images.to(device, non_blocking=True)
    inputs = normalize(images[..., :3], config.mean, config.std)
    with torch.no_grad(), amp.autocast():
        views = [network.backbone(each) for each in ([inputs, inputs.flip(3)] if mirror else [inputs])]
    features = torch.stack(views, dim=1).float().cpu()
    if features.abs().max() < _MAX_HALF:
        features = features.half()
    regions = read_regions_channel(images)
    if regions is not None:
        height, width = features.shape[3:]
        regions = functional.adaptive_avg_pool2d(regions[:, None], (height, width))[:, 0].half().cpu()
    return _Features(features, labels, regions)
