"""Do two models, of which one should be the other in another precision or engine, say and show the same?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, cosines


@dataclass(frozen=True)
class Agreement:
    """Two models on the same N pictures.

    Attributes:
        images: N.
        same_class: share of pictures with the same answer.
        same_cells: share of equal cells among the m of the first model's answer; None where they have no comparable
            slots: another m or another grid, or no slots at all.
        largest_cosine_difference: over all pictures and classes; None where one of them has no cosines.
    """

    images: int
    same_class: float
    same_cells: float | None
    largest_cosine_difference: float | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def agreement(first: tuple[Outputs, Metadata], second: tuple[Outputs, Metadata]) -> Agreement:
    """Compare two models' answers for the same pictures, row for row; their classes are the same."""
    (ours, mine), (theirs, other) = first, second
    answers = ours.logits.argmax(axis=1)
    same = float((answers == theirs.logits.argmax(axis=1)).mean())
    cells, gap = None, None
    if ours.scores is not None and theirs.scores is not None:
        difference = cosines(ours.scores, mine.prototypes_per_class, mine.epsilon) - cosines(
            theirs.scores, other.prototypes_per_class, other.epsilon
        )
        gap = float(np.abs(difference).max())
    comparable = (mine.prototypes_per_class, mine.grid) == (other.prototypes_per_class, other.grid)
    if comparable and ours.argmax is not None and theirs.argmax is not None:
        m = mine.prototypes_per_class
        block = answers[:, None] * m + np.arange(m)  # [N, m]
        equal = np.take_along_axis(ours.argmax, block, axis=1) == np.take_along_axis(theirs.argmax, block, axis=1)
        cells = float(equal.mean())
    return Agreement(len(answers), same, cells, gap)
