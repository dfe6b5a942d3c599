"""Cells of an image: those of the evidence, rankings for removal, Grad-CAM, painting over, and the pixels they see.

The effective receptive field is measured with gradients, after Luo, Li, Urtasun and Zemel, "Understanding the effective
receptive field in deep convolutional neural networks" (NeurIPS 2016): a score depends mostly on a small part of its
theoretical field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.heads import find_values
from opal_deploy.artifact.measurements import ENERGY_SHARE, ReceptiveField
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.session import choose_samples, load_pixels
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.receptive_field import compute_receptive_field
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import ImageBatch

CONTRIBUTION, RANDOM, GRAD_CAM = "contribution", "random", "grad-cam"
RANKINGS = (CONTRIBUTION, RANDOM, GRAD_CAM)

# first words of the seeds of random cells
_STREAM = (11, 0)

# of an effective field: on cub_mini with a ResNet-18 at stride 16, 12, 24 and 48 images gave sides of 66, 66, 64 pixels
_IMAGES = 16
# a box is moved to where its cell looks if that is further from the middle of the cell's place, in cells
_LEAST_OFFSET = 0.1
# images whose graph is in memory at a time
_BATCH = 8

ImageArray = NDArray[np.uint8]


def sum_by_cell(class_id: int, outputs: Outputs, row: int, metadata: Metadata) -> dict[int, float]:
    """Return the cells of a class's slots with their contribution to the class's cosine, the largest first.

    Slots that share a cell add up. For the Euclidean head this is the slots' `contribution`.
    """
    assert outputs.scores is not None  # evidence is exact
    assert outputs.argmax is not None
    channels, slots = metadata.class_map.channels(class_id), metadata.class_map.slots(class_id)
    z = find_values(outputs.scores[row : row + 1], metadata)[0, channels]
    parts = z * metadata.class_map.weights[class_id, slots]
    sums: dict[int, float] = {}
    for cell, part in zip(outputs.argmax[row, channels].tolist(), parts.tolist(), strict=True):
        sums[cell] = sums.get(cell, 0.0) + part
    # a stable sort: of equal sums the first slot's cell
    return {cell: sums[cell] for cell in sorted(sums, key=lambda cell: -sums[cell])}


def build_rankings(
    outputs: Outputs, row: int, metadata: Metadata, foreground: NDArray[np.bool_], *, index: int,
    heat_map: NDArray[np.float32] | None = None,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Return the cells of image `row` of a batch in the order of their removal, by ranking; empty ones are left out.

    `contribution` holds the d different cells of the predicted class's slots, the others at most d. `random` draws from
    foreground cells that are not evidence, since removing background would be too easy to beat; a small object may
    have fewer than d. `grad-cam` are the peaks of its map.

    Args:
        foreground: bool [H * W].
        index: of the image in the split, on which its random cells depend.
        heat_map: float32 [H * W], by Grad-CAM; None leaves that ranking out.
    """
    evidence = tuple(sum_by_cell(int(outputs.logits[row].argmax()), outputs, row, metadata))
    shuffled = np.random.default_rng((*_STREAM, index)).permutation(len(foreground)).tolist()
    others = [cell for cell in shuffled if foreground[cell] and cell not in evidence]
    rankings = {CONTRIBUTION: evidence, RANDOM: tuple(others[: len(evidence)])}
    if heat_map is not None:
        rankings[GRAD_CAM] = tuple(np.argsort(-heat_map, kind="stable")[: len(evidence)].tolist())
    return {name: cells for name, cells in rankings.items() if cells}


class GradCam:
    """Grad-CAM (Selvaraju et al. 2017) of the classes' logits at the features before the projection, by Captum.

    Maps are not rectified: the peaks are the same, and maps without positive values still have an order.
    """

    def __init__(self, network: OpalNetwork) -> None:
        from captum.attr import LayerGradCam

        self._network, self._method = network.eval(), LayerGradCam(network, network.backbone)

    def __call__(self, images: ImageBatch, classes: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Return relevances float32 [n, H * W] for images uint8 [n, H0, W0, 3] and class ids [n]."""
        config, device = self._network.config, next(self._network.parameters()).device
        pixels = torch.from_numpy(normalise(images, config.mean, config.std)).to(device).requires_grad_()
        maps = self._method.attribute(pixels, target=torch.from_numpy(classes.astype(np.int64)).to(device))
        heat_map: NDArray[np.float32] = maps.detach().flatten(1).float().cpu().numpy()
        return heat_map


def blur_image(image: ImageArray, grid: CellGrid) -> ImageArray:
    """Return the image that removed cells are painted from: uint8 [H0, W0, 3].

    The blur is Gaussian, with a standard deviation of half a cell's smaller side, which keeps a cell's colours but not
    its shapes.
    """
    radius = min(image.shape[0] / grid.rows, image.shape[1] / grid.cols) / 2
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)), np.uint8)


def replace_cells(image: ImageArray, replacement: ImageArray, cells: frozenset[int], grid: CellGrid) -> ImageArray:
    """Return `image` with the boxes of `cells` (flat row-major in `grid`) taken from `replacement`."""
    changed = image.copy()
    rows, cols = np.divmod(np.array([sorted(cells)], np.int64), grid.cols)
    boxes = grid.boxes([(0, 0, image.shape[1], image.shape[0])], rows, cols)[0]
    for x0, y0, x1, y1 in np.rint(boxes).astype(np.int64):
        changed[y0:y1, x0:x1] = replacement[y0:y1, x0:x1]
    return changed


def measure_receptive_field(network: OpalNetwork, samples: list[Sample], *, boxes: bool = True) -> ReceptiveField:
    """Return the theoretical field of a network's cells and, for `exact` evidence, the effective one.

    For each image and each slot of its predicted class, the gradient of the slot's score at its cell with respect to
    the normalised input is squared, summed over colours, and divided by its sum over pixels, so that all slots of all
    images have equal weight. `effective_offset` is the mean centroid of these shares, over slots, images and both axes,
    minus `stride` times the cell; `box_offset` moves the boxes there. `effective` is the side of the smallest square of
    whole pixels around that centre in which the mean of the shares reaches 90 %; it may reach beyond the image, where
    there is no energy.

    Args:
        network: trained; left in evaluation mode.
        samples: at least one; up to 16 of them are used, evenly over the classes.
        boxes: crop images to the samples' boxes.
    """
    device, config = next(network.eval().parameters()).device, network.config
    field, (height, width) = compute_receptive_field(network.backbone, config.input_size), config.input_size
    if config.head.evidence != "exact":
        return field
    chosen = choose_samples(samples, _IMAGES)
    images = load_pixels(samples, config.form, chosen=chosen, boxes=boxes)
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
    shift = offset / field.stride - 0.5
    return replace(
        field, effective=side, effective_offset=round(offset, 2), images=len(images),
        box_offset=round(shift, 3) if abs(shift) > _LEAST_OFFSET else 0.0,
    )  # fmt: skip


def _score_gradients(network: OpalNetwork, pixels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each slot's cells, int64 [n], and its gradients' energy, float64 [n, H0, W0] of any scale, for n images."""
    with torch.enable_grad():
        outputs = network.explain(pixels)
        assert outputs.attention is not None  # evidence is exact
        assert outputs.argmax is not None
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
