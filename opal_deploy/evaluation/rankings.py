"""Rankings of cells for removal: the evidence, its reverse, and controls with as many cells, Grad-CAM's among them.

The random control draws from cells that show the object, since removing background would be too easy to beat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.artifact.heads import find_values
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import ImageBatch

CONTRIBUTION, REVERSE, RANDOM = "contribution", "reverse", "random"
RUNNER_UP, ANOTHER, GRAD_CAM = "runner-up", "another class", "grad-cam"
RANKINGS = (CONTRIBUTION, REVERSE, RANDOM, RUNNER_UP, ANOTHER, GRAD_CAM)

# first word of the seeds: a stream of its own
_STREAM = 11


@dataclass(frozen=True)
class Rankings:
    """The cells of one image, flat row-major, in the order in which they are removed or put back.

    Attributes:
        cells: ranking -> its different cells, at most d; rankings without any cell are left out.
    """

    predicted: int
    cells: dict[str, tuple[int, ...]]

    @property
    def evidence(self) -> tuple[int, ...]:
        """The d different cells of the predicted class's m slots, the strongest first."""
        return self.cells[CONTRIBUTION]


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
) -> Rankings:
    """Return the rankings of image `row` of a batch.

    `random` draws from foreground cells that are not evidence; a small object may have fewer than d.
    `runner-up` and `another class` take the cells of those classes' slots, evidence or not: a class that looks at the
    same places is a fair rival. If it has fewer than d cells, random cells that are not evidence follow.
    `reverse` needs at least two cells.

    Args:
        foreground: bool [H * W].
        index: of the image in the split; random cells depend on `seed` and `index` only.
        heat_map: float32 [H * W], by Grad-CAM; None leaves that ranking out.
    """
    rng = np.random.default_rng((_STREAM, seed, index))
    classes = np.argsort(-outputs.logits[row], kind="stable")
    predicted = int(classes[0])
    evidence = evidence_cells(predicted, outputs, row, metadata)
    d = len(evidence)
    shuffled = [int(cell) for cell in rng.permutation(len(foreground)) if cell not in evidence]
    foreground_cells = [cell for cell in shuffled if foreground[cell]]
    spare = foreground_cells + [cell for cell in shuffled if not foreground[cell]]
    rivals = {RUNNER_UP: int(classes[1])} if len(classes) > 1 else {}
    if len(classes) > 2:
        rivals[ANOTHER] = int(rng.choice(classes[2:]))

    rankings = {CONTRIBUTION: evidence}
    if d > 1:
        rankings[REVERSE] = evidence[::-1]
    rankings[RANDOM] = tuple(foreground_cells[:d])
    for name, class_id in rivals.items():
        own = evidence_cells(class_id, outputs, row, metadata)
        rankings[name] = (*own, *(cell for cell in spare if cell not in own))[:d]
    if heat_map is not None:
        rankings[GRAD_CAM] = tuple(int(cell) for cell in np.argsort(-heat_map, kind="stable")[:d])
    return Rankings(predicted, {name: cells for name, cells in rankings.items() if cells})


HeatMap = Callable[[ImageBatch, NDArray[np.int64]], NDArray[np.float32]]
"""Returns relevances float32 [n, H * W] for images uint8 [n, H0, W0, 3] and class ids [n]."""


class GradCam:
    """Grad-CAM (Selvaraju et al. 2017) of the classes' logits at the features before the projection.

    Maps are not rectified: the peaks are the same, and maps without positive values still have an order.
    """

    def __init__(self, network: OpalNetwork) -> None:
        self._network = network.eval()
        self._device = next(network.parameters()).device

    def __call__(self, images: ImageBatch, classes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the maps of the given classes; see `HeatMap`."""
        config = self._network.config
        pixels = torch.from_numpy(normalise(images, config.mean, config.std)).to(self._device)
        with torch.no_grad():
            features = self._network.backbone(pixels)
        with torch.enable_grad():
            features = features.detach().requires_grad_()  # [n, D, H, W]
            logits = self._network.head(features)
            selected = logits.gather(1, torch.from_numpy(classes).to(self._device)[:, None]).sum()
            (gradient,) = torch.autograd.grad(selected, features)
        weights = gradient.mean(dim=(2, 3), keepdim=True)
        heat_map: NDArray[np.float32] = (weights * features.detach()).sum(1).flatten(1).float().cpu().numpy()
        return heat_map
