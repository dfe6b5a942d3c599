"""The gates that a model's outputs must pass when they are compared with a reference.

fp32: every cosine within 1e-6, every cell equal except ties (best and second within 1e-4 of each other). fp16 and
bf16: at least 99.5 % of the predicted block's cells, int8 at least 97 %, near ties (within 1e-2) left out; the class
equal wherever the margin exceeds twice the cosine difference measured. Logits are compared where |logit| > 1e-2: the
root magnifies rounding near zero.

A share of few cells says little: of networks that lose 0.5 %, nearly every second shows 2 in 320. The exporter
therefore refuses a share only where its exact one-sided upper bound (Clopper and Pearson) is under what is required,
and takes more images until a bound decides (`Agreement`).

Some networks do not even agree with themselves to 1e-6: PyTorch's own outputs move by more when its convolutions sum in
another order, or when they are computed in float64. For those, and only those, the exporter measures that movement
(`Rounding`) and widens the gate to four times its size, within `WIDEST`: it shows a part of what another runtime's
kernels may do. The gate that was used is written into the artifact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs, cosines
from opal_deploy.statistics import share_bounds

# the gate of a network is widened to this many times its own rounding
_ROUNDING_FACTOR = 4
# cells whose best value leads by less than this are near ties: lower precisions may choose the other cell
NEAR_TIE = 1e-2


@dataclass(frozen=True)
class Gate:
    """The largest differences that a precision may cause.

    Attributes:
        cosine: largest difference of any class's cosine.
        logit: largest difference of a logit, relative to max(1, |logit|).
        score: largest difference of a score.
        tie: relative lead of the best cell under which two cells count as equal.
        cells: share of the predicted class's untied cells that must agree; all untied cells of all classes for 1.0.
        all_cells: share of the untied cells of all classes that must agree: what no rounding explains.
    """

    cosine: float
    logit: float
    score: float
    tie: float
    cells: float
    all_cells: float = 0.0

    def widened_by(self, rounding: Rounding) -> Gate:
        """Return the gate that a network with this much rounding of its own can pass; never beyond `WIDEST`."""
        return replace(
            self,
            cosine=max(self.cosine, min(_ROUNDING_FACTOR * rounding.cosine, WIDEST.cosine)),
            score=max(self.score, min(_ROUNDING_FACTOR * rounding.score, WIDEST.score)),
            tie=max(self.tie, min(_ROUNDING_FACTOR * rounding.relative_score, WIDEST.tie)),
        )

    def relaxed_for_machine(self) -> Gate:
        """Return the gate for another machine than the exporting one, whose kernels sum in an order of their own.

        It is ten times as wide where the gate allows for rounding only; a lower precision's gate is wide enough. The
        few stored vectors have too few cells of predicted classes for a share of 99.5 % to mean much: there the share
        of all cells counts, and near ties do not.
        """

        def wider(own: float, widest: float) -> float:
            return min(10 * own, max(own, widest))

        return replace(
            self,
            cosine=wider(self.cosine, WIDEST.cosine),
            score=wider(self.score, WIDEST.score),
            tie=wider(self.tie, WIDEST.tie) if self.cells >= 1.0 else NEAR_TIE,
            cells=1.0 if self.cells >= 1.0 else min(self.cells, self.all_cells),
        )


@dataclass(frozen=True)
class Rounding:
    """How far a network's float32 outputs move when only the order of summation changes, or the precision of sums.

    Attributes:
        cosine, score: largest absolute movement.
        relative_score: largest movement of a score relative to the score.
    """

    cosine: float
    score: float
    relative_score: float

    @staticmethod
    def between(one: Outputs, others: Sequence[Outputs], metadata: Metadata) -> Rounding:
        """Return the largest movement from one run of a network to others on the same images; zero without scores."""
        movements = [_movement(one, other, metadata) for other in others if one.scores is not None]
        return Rounding(*(max(values) for values in zip(*movements, strict=True))) if movements else Rounding(0, 0, 0)


def _movement(one: Outputs, other: Outputs, metadata: Metadata) -> tuple[float, float, float]:
    scores = cast(FloatArray, one.scores)
    difference = np.abs(scores - cast(FloatArray, other.scores))
    return (
        float(np.abs(compute_cosines(one, metadata) - compute_cosines(other, metadata)).max()),
        float(difference.max()),
        float((difference / np.maximum(np.abs(scores), 1e-30)).max()),
    )


# a network noisier than this has no outputs to reproduce
WIDEST = Gate(cosine=1e-4, logit=1e-3, score=1e-4, tie=1e-2, cells=1.0)

GATES = {
    "fp32": Gate(cosine=1e-6, logit=1e-4, score=1e-5, tie=1e-4, cells=1.0),
    "fp16": Gate(cosine=2e-2, logit=5e-2, score=5e-2, tie=NEAR_TIE, cells=0.995, all_cells=0.9),
    "bf16": Gate(cosine=5e-2, logit=1e-1, score=1e-1, tie=NEAR_TIE, cells=0.995, all_cells=0.7),
    "int8": Gate(cosine=2e-1, logit=3e-1, score=3e-1, tie=NEAR_TIE, cells=0.97, all_cells=0.3),
}


@dataclass(frozen=True)
class Agreement:
    """The share of the predicted classes' cells that agree, near ties left out, with its exact one-sided bounds.

    Attributes:
        share: observed; 1.0 without cells.
        low, high: bounds of the share in all images of this kind, each at `confidence`, cells taken as independent.
        confidence: of each bound.
        required: share that the gate requires.
    """

    share: float
    low: float
    high: float
    confidence: float
    required: float

    @staticmethod
    def of(equal: int, cells: int, required: float, confidence: float) -> Agreement:
        """Return the agreement of `equal` of `cells` cells."""
        low, high = share_bounds(equal, cells, confidence)
        return Agreement(equal / cells if cells else 1.0, low, high, confidence, required)

    @property
    def shown(self) -> bool:
        """Whether the share is shown to be what is required."""
        return self.low >= self.required

    @property
    def refuted(self) -> bool:
        """Whether the share is shown to be less than what is required."""
        return self.high < self.required


def compute_cosines(outputs: Outputs, metadata: Metadata) -> Any:
    """Return the cosines [N, C], float64, that follow from the scores."""
    return cosines(cast(FloatArray, outputs.scores), metadata.prototypes_per_class, metadata.epsilon)
