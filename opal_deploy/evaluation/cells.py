"""Cells of an image: those of the evidence, rankings of them for removal with controls, Grad-CAM, and painting over."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from opal_deploy.artifact.heads import find_values
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.evaluation.options import Fill
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import ImageBatch

CONTRIBUTION, RANDOM, GRAD_CAM = "contribution", "random", "grad-cam"
RANKINGS = (CONTRIBUTION, RANDOM, GRAD_CAM)

# first words of the seeds of random cells and of the noise fill
_STREAM, _FILL_STREAM = 11, 12

ImageArray = NDArray[np.uint8]


def evidence_cells(class_id: int, outputs: Outputs, row: int, metadata: Metadata) -> tuple[int, ...]:
    """Return the different cells of a class's slots by their contribution to the class's cosine, the largest first.

    Slots that share a cell add up. For the Euclidean head this is the slots' `contribution`.
    """
    if outputs.scores is None or outputs.argmax is None:
        raise ValueError("a model without slots has no cells")
    channels, slots = metadata.class_map.channels(class_id), metadata.class_map.slots(class_id)
    z = find_values(outputs.scores[row : row + 1], metadata)[0, channels]
    parts = z * metadata.class_map.weights[class_id, slots]
    sums: dict[int, float] = {}
    for cell, part in zip(outputs.argmax[row, channels].tolist(), parts.tolist(), strict=True):
        sums[cell] = sums.get(cell, 0.0) + part
    # a stable sort: of equal sums the first slot's cell
    return tuple(sorted(sums, key=lambda cell: -sums[cell]))


def build_rankings(
    outputs: Outputs,
    row: int,
    metadata: Metadata,
    foreground: NDArray[np.bool_],
    *,
    seed: int,
    index: int,
    heat_map: NDArray[np.float32] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return the cells of image `row` of a batch in the order of their removal, by ranking; empty ones are left out.

    `contribution` holds the d different cells of the predicted class's slots, the others at most d. `random` draws from
    foreground cells that are not evidence, since removing background would be too easy to beat; a small object may
    have fewer than d. `grad-cam` are the peaks of its map.

    Args:
        foreground: bool [H * W].
        index: of the image in the split; random cells depend on `seed` and `index` only.
        heat_map: float32 [H * W], by Grad-CAM; None leaves that ranking out.
    """
    evidence = evidence_cells(int(outputs.logits[row].argmax()), outputs, row, metadata)
    shuffled = np.random.default_rng((_STREAM, seed, index)).permutation(len(foreground)).tolist()
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
        import torch

        config, device = self._network.config, next(self._network.parameters()).device
        pixels = torch.from_numpy(normalise(images, config.mean, config.std)).to(device).requires_grad_()
        maps = self._method.attribute(pixels, target=torch.from_numpy(classes.astype(np.int64)).to(device))
        heat_map: NDArray[np.float32] = maps.detach().flatten(1).float().cpu().numpy()
        return heat_map


def fill_image(image: ImageArray, fill: Fill, grid: tuple[int, int], *, seed: int, index: int) -> ImageArray:
    """Return the image that removed cells are painted from: uint8 [H0, W0, 3].

    Each fill is unnatural in its own way. `blur`: Gaussian, with a standard deviation of half a cell's smaller side,
    which keeps a cell's colours but not its shapes. `mean`: the image's mean colour. `noise`: normal, with the image's
    mean and standard deviation per channel; depends only on `seed` and the image's `index`.
    """
    if fill == "blur":
        radius = min(image.shape[0] / grid[0], image.shape[1] / grid[1]) / 2
        return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)), np.uint8)
    mean = image.mean(axis=(0, 1))
    if fill == "mean":
        return np.full_like(image, np.rint(mean).astype(np.uint8))
    drawn = np.random.default_rng((_FILL_STREAM, seed, index)).standard_normal(image.shape)
    noise: ImageArray = np.rint(mean + image.std(axis=(0, 1)) * drawn).clip(0, 255).astype(np.uint8)
    return noise


def replace_cells(
    image: ImageArray, replacement: ImageArray, cells: frozenset[int], grid: tuple[int, int]
) -> ImageArray:
    """Return `image` with the rectangles of `cells` (flat row-major in `grid`) taken from `replacement`."""
    y, x = find_edges((image.shape[0], image.shape[1]), grid)
    changed = image.copy()
    for cell in cells:
        row, col = divmod(cell, grid[1])
        rectangle = (slice(y[row], y[row + 1]), slice(x[col], x[col + 1]))
        changed[rectangle] = replacement[rectangle]
    return changed


def find_edges(size: tuple[int, int], grid: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges of the cells of a grid (H, W) in an input (H0, W0): rows int64 [H + 1], columns [W + 1]."""
    y, x = (np.rint(np.linspace(0, length, n + 1)).astype(np.int64) for length, n in zip(size, grid, strict=True))
    return y, x
