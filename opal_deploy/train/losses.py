"""The training loss: cross-entropy, and terms of the attention; the exported graph stays the same.

**Kept-off regions**, such as a photographer's stamp, should give the labelled class no evidence:

    penalty = mean over the m slots of the maximum over cells of (share of the cell in the region) * A(slot, cell)

The surroundings of the object are such a region while the head is fitted (`--foreground`). The images of `--background`
enter no loss: they fit the score that tells unknown images (`loop`).

**Adversarial training**: a box shows the decisive pixels only if changes outside it have no effect. Each image is
trained on twice: as it is, and changed by a few grey levels outside the boxes of the labelled class. The change is one
step along the gradient's sign from a random start (Goodfellow et al., ICLR 2015; Wong et al., ICLR 2020) against the
mean of the class's scores, which `evaluate --attack-outside` attacks in more steps. The loss gains

    weight * (cross-entropy of the changed image + 4 * mean over the m slots of the drop of their score)

with the drop taken at the cells of the unchanged image.

**Slots apart**, while the head is fitted: all slots of a class may answer to one part. The loss gains, weighted, the
cross-entropy with the scores that the labelled class's slots have where each, the strongest first, stays more than 1.5
cells away from those before it. Meanwhile a score is the mean over a slot's strongest cells, 4 of 14 x 14: single cells
that tell the training images from each other are often no part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.datasets.samples import DataSet
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.attack import LEVELS, outside_boxes
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.options import TrainOptions

# the attack that `evaluate` measures, in one step
_MARGIN = EvaluateOptions.attack_margin
# cells that slots are kept apart, and the share of the cells that scores are means of
_APART, _STRONGEST = 1.5, 0.02
# weight of the drop relative to the changed image's cross-entropy
DROP = 4.0


class Terms(NamedTuple):
    """The terms of the loss for n images."""

    logits: Tensor  # [n, C]
    kept_off: Tensor  # [n], the penalty of kept-off regions, 0 ... 1
    changed: Tensor | None = None  # [n, C], logits of images changed outside the boxes; None without such training
    drop: Tensor | None = None  # [n], mean drop of the labelled class's scores in the changed images, at least 0
    apart: Tensor | None = None  # [n, C], logits with slots kept apart; None where they are not


@dataclass(frozen=True)
class Objective:
    """The weights of the training loss; a term of weight 0 is left out."""

    keep_off: float = 0.0  # of the attention in kept-off regions
    adversarial: float = 0.0  # of the loss on images changed outside the boxes
    apart: float = 0.0  # of the loss with slots kept apart
    class_weights: Tensor | None = None  # float32 [C] on the device, the weight per class; None weighs all the same
    scale: float = 1.0  # factor of the logits, see `find_logit_scale`

    def __call__(self, terms: Terms, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective and the weighted cross-entropy in nats, summed over n images with labels int64 [n]."""
        cross_entropy = self._measure_cross_entropy(terms.logits, labels)
        objective = cross_entropy + self.keep_off * terms.kept_off.sum()
        if terms.changed is not None and terms.drop is not None:
            changed = self._measure_cross_entropy(terms.changed, labels)
            objective = objective + self.adversarial * (changed + DROP * terms.drop.sum())
        if terms.apart is not None:
            objective = objective + self.apart * self._measure_cross_entropy(terms.apart, labels)
        return objective, cross_entropy.detach()

    def _measure_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = self.scale * logits.float()
        return functional.cross_entropy(logits, labels, weight=self.class_weights, reduction="sum")


def make_objective(options: TrainOptions, data: DataSet, head: OpalHead, *, fitting: bool = False) -> Objective:
    """Return the training loss of a run; `fitting`: while the head is fitted to the frozen network."""
    weights, scale = None, find_logit_scale(head, options.anchor_probability)
    if options.class_weights == "balanced":
        weights = torch.tensor(balance_classes(data), device=next(head.parameters()).device)
    if not fitting:
        return Objective(options.region_weight, options.adversarial, class_weights=weights, scale=scale)
    keep_off = options.region_weight if options.keep_off else options.foreground
    # in fine-tuning, slots kept apart went into the background
    return Objective(keep_off, options.adversarial, options.apart, weights, scale)


def balance_classes(data: DataSet) -> list[float]:
    """Return a weight per class, N / (C * n_c), of N training images and n_c, at least 1, of class c."""
    counts = Counter(sample.label for sample in data.train)
    return [len(data.train) / (data.num_classes * max(counts[label], 1)) for label in range(data.num_classes)]


def find_logit_scale(head: OpalHead, probability: float | None) -> float:
    """Return the factor, at least 1, that gives an embedding at its class's anchor this probability.

    The softmax of logits in [-1.41, 0] is far from certain even there: 0.31 for 10 classes, 0.04 for 100. The factor
    is 1 for None and for heads without anchors.
    """
    if probability is None or head.anchors is None:
        return 1.0
    anchors = torch.from_numpy(head.config.class_map(head.num_classes).matrix).to(head.anchors)
    with torch.no_grad():
        own, *others = sorted(head.classify(anchors[:1])[0].tolist(), reverse=True)
    odds = probability / (1 - probability) * len(others)
    return max(math.log(odds) / (own - others[0]), 1.0) if own > others[0] else 1.0


class HeadTerms(nn.Module):
    """A head, whose evidence is `exact` if there are any terms, with the terms of its attention in the loss."""

    channel_table: Tensor

    def __init__(self, head: OpalHead, *, fitting: bool = False, apart: bool = False) -> None:
        """Wrap a head; `fitting`: while it is fitted to the frozen network; `apart`: with slots kept apart."""
        super().__init__()
        # without single cells as evidence nothing can be kept apart
        self.head, self.fitting = head, fitting and head.config.evidence == "exact"
        self.apart = self.fitting and apart
        table = head.config.class_map(head.num_classes).channel_table
        self.register_buffer("channel_table", torch.from_numpy(table), persistent=False)

    def forward(self, features: Tensor, labels: Tensor, regions: Tensor | None) -> Terms:
        """Return the terms of the loss for features [n, D, H, W] and labels int64 [n].

        `regions` are the share of each pixel or cell that is kept off, float [n, rows, cols], 0 ... 1; None for none.
        """
        head = self.head
        attention = head.attend(head.project(features))  # [n, K, H, W]
        scores, channels, apart = head.pool(attention), self.channel_table[labels], None
        if self.fitting:
            cells = attention.flatten(2)
            scores = cells.topk(max(round(_STRONGEST * cells.shape[2]), 1), dim=2).values.mean(2)
        if self.apart:
            apart = head.classify(scores.scatter(1, channels, keep_apart(attention, channels)))
        logits = head.classify(scores)
        if regions is None:
            return Terms(logits, logits.new_zeros(len(labels), dtype=torch.float32), apart=apart)
        return Terms(logits, measure_kept_off(attention, channels, regions), apart=apart)

    def attend(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, C] and the attention of the labelled class's slots [n, m, H * W] for features."""
        attention = self.head.attend(self.head.project(features))
        return self.head.classify(self.head.pool(attention)), _gather(attention, self.channel_table[labels])


class NetworkTerms(nn.Module):
    """A network with the terms of its attention in the loss: `HeadTerms` on normalised images [n, 3, H0, W0].

    With `adversarial`, images changed outside the boxes are trained on, too.
    """

    def __init__(self, network: OpalNetwork, *, adversarial: bool = False) -> None:
        super().__init__()
        self.backbone = network.backbone
        self.terms = HeadTerms(network.head)
        self.adversarial = adversarial
        self._config, self._grid = network.config, network.grid

    def forward(self, images: Tensor, labels: Tensor, regions: Tensor | None) -> Terms:
        features = self.backbone(images)
        terms: Terms = self.terms(features, labels, regions)
        if not self.adversarial:
            return terms
        with torch.no_grad():
            scores, cells = self.terms.attend(features, labels)[1].max(dim=2)
        training = self.backbone.training
        # with the batch statistics of unchanged images, as in inference
        self.backbone.eval()

        def measure_score(pixels: Tensor) -> Tensor:
            return self.terms.attend(self.backbone(pixels), labels)[1].amax(dim=2).mean(dim=1)

        changed = change_outside(images, cells, measure_score, self._config, self._grid)
        logits, attention = self.terms.attend(self.backbone(changed), labels)
        self.backbone.train(training)
        drop = (scores - attention.gather(2, cells[..., None])[..., 0]).clamp_min(0)
        return terms._replace(changed=logits, drop=drop.mean(dim=1))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def change_outside(
    images: Tensor, cells: Tensor, score: Callable[[Tensor], Tensor], config: NetworkConfig, grid: tuple[int, int]
) -> Tensor:
    """Return normalised images, float32 [n, 3, H0, W0], changed outside the boxes of some cells so that `score` drops.

    Cells, int64 [n, m], flat, are the labelled class's slots'. `score` returns [n] values of images. `config` is the
    attacked network's, `grid` its feature map's (H, W).
    """
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (config.mean, config.std))
    bounds = LEVELS / 255 / std, -mean / std, (1 - mean) / std
    limit, darkest, brightest = (bound.to(images.device) for bound in bounds)
    free = outside_boxes(cells, torch.ones_like(cells, dtype=torch.bool), config.input_size, CellGrid(*grid), _MARGIN)
    # half of what is allowed at random, so that the step has room
    start = (images + (torch.rand_like(images) - 0.5) * limit * free).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(score(start).sum(), start)
    change = (start.detach() - images - limit * gradient.sign()).clamp(-limit, limit) * free
    return (images + change).clamp(darkest, brightest)


def measure_kept_off(attention: Tensor, channels: Tensor, regions: Tensor) -> Tensor:
    """Return the attention of the labelled class's slots in kept-off regions, [n], 0 ... 1.

    Attention is float32 [n, K, H, W], channels, int64 [n, m], are the slots', and regions, float [n, rows, cols], the
    share of each pixel or cell that is kept off, 0 ... 1.
    """
    height, width = attention.shape[2:]
    shares = functional.adaptive_avg_pool2d(regions[:, None], (height, width)).flatten(2)  # [n, 1, H * W]
    return (_gather(attention, channels) * shares).amax(dim=2).mean(dim=1)


def keep_apart(attention: Tensor, channels: Tensor) -> Tensor:
    """Return the scores [n, m] of some slots where each stays more than 1.5 cells away from the stronger ones' cells.

    Attention is float32 [n, K, H, W]; channels, int64 [n, m], are the slots'.
    """
    own = _gather(attention, channels)  # [n, m, H * W]
    order = own.amax(2).argsort(1, descending=True)
    height, width = attention.shape[2:]
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float().to(own.device)
    near = torch.cdist(places, places) <= _APART
    taken, scores = torch.zeros_like(own[:, 0], dtype=torch.bool), []
    for slot in order.unbind(1):
        score, cell = own[torch.arange(len(own)), slot].masked_fill(taken, 0.0).max(1)
        scores.append(score)
        taken = taken | near[cell]
    return torch.zeros_like(own[..., 0]).scatter(1, order, torch.stack(scores, 1))


def read_regions_channel(images: Tensor) -> Tensor | None:
    """Return the share of each pixel that is kept off, float [n, H0, W0], of images [n, H0, W0, 4]; None for three."""
    return images[..., 3].float() / 255.0 if images.shape[3] == 4 else None


def _gather(attention: Tensor, channels: Tensor) -> Tensor:
    """Return the attention [n, m, H * W] of n images' channels [n, m]."""
    rows = torch.arange(len(channels), device=channels.device)[:, None]
    return attention.flatten(2)[rows, channels]
