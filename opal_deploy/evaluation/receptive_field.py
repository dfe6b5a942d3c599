"""The effective receptive field of a trained network's cells, measured with gradients.

After Luo, Li, Urtasun and Zemel, "Understanding the effective receptive field in deep convolutional neural networks"
(NeurIPS 2016): a score depends mostly on a small part of its theoretical receptive field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opal_deploy.artifact.measurements import ENERGY_SHARE, ReceptiveField
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.session import choose_samples, prepared_batches
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.receptive_field import compute_receptive_field
from opal_deploy.preprocess.resize import normalise

# on cub_mini with a ResNet-18 at stride 16, 12, 24 and 48 images gave sides of 66, 66 and 64 pixels
_IMAGES = 16
# images whose graph is in memory at a time
_BATCH = 8


def measure_receptive_field(network: OpalNetwork, samples: list[Sample], *, boxes: bool = True) -> ReceptiveField:
    """Return the theoretical field of a network's cells and, for `exact` evidence, the effective one.

    Args:
        network: trained; left in evaluation mode.
        samples: at least one; up to 16 of them are used, evenly over the classes.
    """
    field = compute_receptive_field(network.backbone, network.config.input_size)
    if network.config.head.evidence != "exact":
        return field
    chosen = [samples[index] for index in choose_samples(samples, _IMAGES)]
    batches = prepared_batches(chosen, network.config.input_size, boxes=boxes, batch=_BATCH)
    return measure_effective_field(network, np.concatenate([pixels for pixels, _ in batches]), field)


def measure_effective_field(network: OpalNetwork, images: NDArray[np.uint8], field: ReceptiveField) -> ReceptiveField:
    """Return `field` with the effective receptive field of a trained network, measured on images.

    For each image and each slot of its predicted class, the gradient of the slot's score at its cell with respect to
    the normalised input is squared, summed over colours, and divided by its sum over pixels, so that all slots of all
    images have equal weight. `effective_offset` is the mean centroid of these shares, over slots, images and both axes,
    minus `stride` times the cell. `effective` is the side of the smallest square of whole pixels around that centre in
    which the mean of the shares reaches 90 %; it may reach beyond the image, where there is no energy.

    `images`: uint8 [n, H0, W0, 3] of the network's input size, n at least 1.
    """
    network.eval()
    device = next(network.parameters()).device
    config = network.config
    height, width = config.input_size
    rows, cols, shares = [], [], []
    for first in range(0, len(images), _BATCH):
        pixels = torch.from_numpy(normalise(images[first : first + _BATCH], config.mean, config.std)).to(device)
        for cells, energy in _score_gradients(network, pixels.requires_grad_()):
            total = energy.sum(dim=(1, 2), keepdim=True)
            # a score of exactly 0 or 1 has no gradient in float32
            seen = total[:, 0, 0] > 0
            shares.append((energy / total)[seen].float())
            rows.append(cells[seen] // network.grid[1])
            cols.append(cells[seen] % network.grid[1])
    share = torch.cat(shares)  # [slots, H0, W0]
    if not len(share):
        return field
    # pixels' centres from the corner of the cell's box, [slots, H0] and [slots, W0]
    y = torch.arange(height) + 0.5 - field.stride * torch.cat(rows)[:, None]
    x = torch.arange(width) + 0.5 - field.stride * torch.cat(cols)[:, None]
    offset = float((share.sum(2) * y).sum() + (share.sum(1) * x).sum()) / (2 * len(share))
    distance = torch.maximum((y - offset).abs()[:, :, None], (x - offset).abs()[:, None, :])
    # a square of side k + 1 holds whole pixels whose centres are at most k / 2 from its own
    needed = (2 * distance - 1e-3).ceil().long().flatten()
    inside = torch.bincount(needed, share.flatten().double()).cumsum(0) / len(share)
    side = int(torch.searchsorted(inside, ENERGY_SHARE)) + 1
    return replace(field, effective=side, effective_offset=round(offset, 2), images=len(images))


def _score_gradients(network: OpalNetwork, pixels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each slot's cells, int64 [n], and its gradients' energy, float64 [n, H0, W0] of any scale, for n images."""
    with torch.enable_grad():
        outputs = network.explain(pixels)
        if outputs.attention is None or outputs.argmax is None:
            raise ValueError("a network without slots has no scores")
        table = torch.from_numpy(network.config.class_map.channel_table).to(pixels.device)
        by_slot = table[outputs.logits.argmax(1)].T  # [m, n]
        rows = torch.arange(len(pixels))
        for slot, channels in enumerate(by_slot):
            cells = outputs.argmax[rows, channels].long()
            # not the maximum itself, whose gradient spreads over all cells that tie for it, as on an even background
            scores = outputs.attention.flatten(2)[rows, channels, cells]
            (gradient,) = torch.autograd.grad(scores.sum(), pixels, retain_graph=slot < len(by_slot) - 1)
            gradient = gradient.double().cpu()
            # squares of small gradients would underflow
            gradient /= gradient.abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(1e-300)
            yield cells.cpu(), gradient.square().sum(1)
