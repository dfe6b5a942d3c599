"""Rankings of cells for removal: the evidence, its reverse, and controls with as many cells.

Random controls are drawn from cells that show the object, since removing background would be too easy to beat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, embedding
from opal_deploy.evaluation.annotations import Annotations
from opal_deploy.preprocess.geometry import Geometry

CONTRIBUTION, REVERSE, RANDOM = "contribution", "reverse", "random"
RUNNER_UP, ANOTHER, GRAD_CAM = "runner-up", "another class", "grad-cam"
RANKINGS = (CONTRIBUTION, REVERSE, RANDOM, RUNNER_UP, ANOTHER, GRAD_CAM)

# first word of the seeds: a stream of its own
_STREAM = 11


@dataclass(frozen=True)
class Rankings:
    """The cells of one image, flat row-major, in the order in which they are removed or put back.

    Attributes:
        predicted: the class predicted for the unchanged image.
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

    Slots that share a cell add up. This is the slots' `contribution` for the Euclidean head, and what the measured
    cosine is made of whatever the distance.
    """
    if outputs.scores is None or outputs.argmax is None:
        raise ValueError("a model without slots has no cells")
    m = metadata.prototypes_per_class
    block = slice(class_id * m, (class_id + 1) * m)
    parts = embedding(outputs.scores[row : row + 1], metadata.epsilon)[0, block]
    sums: dict[int, float] = {}
    for cell, part in zip(outputs.argmax[row, block].tolist(), parts.tolist(), strict=True):
        sums[cell] = sums.get(cell, 0.0) + part
    # of equal sums the first slot's cell
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

    `random` draws from foreground cells that are not evidence; a small creature may have fewer than d.
    `runner-up` and `another class` take the cells of those classes' slots as they are, evidence or not: a class that
    looks at the same places is a fair rival. Where it has fewer than d cells, random ones that are not evidence follow.
    `reverse` needs at least two cells.

    Args:
        outputs: for the unchanged images of the batch.
        row: of the image in the batch.
        metadata: of the model.
        foreground: bool [H * W].
        seed: 0 or more.
        index: of the image in its data set; random cells depend on `seed` and `index` only.
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


@dataclass(frozen=True)
class Foreground:
    """The cells that the random control draws from.

    Attributes:
        name: describes the random cells for a person.
        cells: returns bool [H * W] for an image's index in its data set and its geometry.
    """

    name: str
    cells: Callable[[int, Geometry], NDArray[np.bool_]]


def choose_foreground(annotations: Annotations, grid: tuple[int, int]) -> Foreground:
    """Return the best known foreground of N images: cells whose centre lies in the object, else every cell.

    Args:
        annotations: of the N images.
        grid: (H, W).
    """
    return Foreground(
        f"random {annotations.foreground}",
        lambda index, geometry: annotations.images[index].foreground(geometry, grid),
    )
