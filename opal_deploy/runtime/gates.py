"""The gates that a model's outputs must pass when they are compared with a reference.

fp32: every cosine within 1e-6, every cell equal except ties (best and second within 1e-4 of each other). fp16 and
bf16: at least 99.5 % of the predicted block's cells, int8 at least 97 %, near ties (within 1e-2) left out; the class
equal wherever the margin exceeds twice the cosine difference measured. Logits are compared where |logit| > 1e-2: the
root magnifies rounding near zero.

A share of few cells says little. The exporter refuses a share only if its exact one-sided upper bound (Clopper and
Pearson) is below the requirement, and takes more images until a bound decides (`Agreement`).

Float32 itself is not exact to 1e-6 for every network. Where the fp32 gate fails, the exporter therefore compares the
graph with the network in float64, where a wrong weight or epsilon shows. The runtime's float32 outputs may then differ
by `_RUNTIME_FACTOR` times the network's own float32 error (`Rounding`), up to `WIDEST`: far less than half precision in
one layer. The gate that was used is written into the artifact (docs/precision.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, cast

import numpy as np

from opal_deploy.artifact.heads import find_totals, to_distances
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import PER_IMAGE, FloatArray, Outputs, tolerances
from opal_deploy.statistics import share_bounds

# a runtime's kernels may round this many times as much as PyTorch's; one layer in half precision is hundreds of times
_RUNTIME_FACTOR = 32
# squared distances of a distance head under which its logarithm is steep
_NEAR_ZERO = 1e-2
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
        all_cells: share of the untied cells of all classes that must agree; no rounding explains a lower share.
        others: largest absolute difference of each output with one number per image, by name.
    """

    cosine: float
    logit: float
    score: float
    tie: float
    cells: float
    all_cells: float = 0.0
    others: Mapping[str, float] = field(default_factory=lambda: tolerances("fp32"))

    @staticmethod
    def of_model(metadata: Metadata) -> Gate:
        """Return the gate that a model's file passed, or its precision's gate if the file records none."""
        if not (recorded := metadata.verification.get("gate")):
            return GATES[metadata.precision]
        # limits that a file lacks are those of fp32
        limits = GATES["fp32"].to_dict() | recorded
        names = [limit.name for limit in fields(Gate) if limit.name != "others"]
        return Gate(**{name: limits[name] for name in names}, others={name: limits[name] for name in PER_IMAGE})

    def to_dict(self) -> dict[str, float]:
        """Return all limits by name, for the verification report in the metadata."""
        limits = asdict(self)
        others = limits.pop("others")
        return {**limits, **others}

    def widened_by(self, rounding: Rounding) -> Gate:
        """Return the gate for a runtime on which a network with this float32 error is computed; never over `WIDEST`."""

        def widened(own: float, error: float, widest: float) -> float:
            return max(own, min(_RUNTIME_FACTOR * error, widest))

        return replace(
            self,
            cosine=widened(self.cosine, rounding.cosine, WIDEST.cosine),
            logit=widened(self.logit, rounding.logit, WIDEST.logit),
            score=widened(self.score, rounding.score, WIDEST.score),
            tie=widened(self.tie, rounding.relative_score, WIDEST.tie),
        )

    def relaxed_for_machine(self) -> Gate:
        """Return the gate for a machine other than the exporting one, whose kernels sum in another order.

        Where the gate allows for rounding only, it becomes ten times as wide; a lower precision's gate is wide enough.
        The few stored vectors have too few cells of predicted classes for a share of 99.5 % to mean much. There the
        share of all cells counts, without near ties.
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
    """The largest differences between two ways to compute a network on the same images.

    Attributes:
        cosine, score: absolute.
        logit: relative to max(1, |logit|), where |logit| > 1e-2.
        relative_score: relative to the score.
    """

    cosine: float = 0.0
    score: float = 0.0
    relative_score: float = 0.0
    logit: float = 0.0

    @staticmethod
    def between(exact: Outputs, others: Sequence[Outputs], metadata: Metadata) -> Rounding:
        """Return the largest differences of others from `exact`; of a model without scores only the logits'."""
        differences = [_difference(exact, other, metadata) for other in others]
        return Rounding(*(max(values) for values in zip(*differences, strict=True)))

    def exceeds(self, gate: Gate, noise: Rounding) -> str:
        """Return the difference that exceeds both a gate and a network's own float32 error, or an empty string."""
        limits = {
            "cosine": (self.cosine, max(gate.cosine, noise.cosine)),
            "score": (self.score, max(gate.score, noise.score)),
            "logit": (self.logit, max(gate.logit, noise.logit)),
        }
        return "; ".join(
            f"a {name} differs by {value:.3g}, more than {limit:.3g}"
            for name, (value, limit) in limits.items()
            if not value <= limit
        )


def _difference(exact: Outputs, other: Outputs, metadata: Metadata) -> tuple[float, float, float, float]:
    expected, slack = exact.logits.astype(np.float64), logit_slack(exact, metadata, GATES["fp32"].score)
    relative = np.maximum(np.abs(expected - other.logits) - slack, 0.0) / np.maximum(1.0, np.abs(expected))
    logit = float(np.where(np.abs(expected) > 1e-2, relative, 0.0).max())
    if exact.scores is None or other.scores is None:
        return 0.0, 0.0, 0.0, logit
    scores = score_differences(exact, other, metadata)
    cosine = np.abs(compute_totals(exact, metadata) - compute_totals(other, metadata))
    cosine = np.maximum(cosine - slack / total_scale(metadata), 0.0)
    relative_score = scores / np.maximum(np.abs(exact.scores), 1e-30)
    return float(cosine.max()), float(scores.max()), float(relative_score.max()), logit


# the outputs of a network with more rounding cannot be reproduced
WIDEST = Gate(cosine=1e-4, logit=1e-3, score=1e-4, tie=1e-2, cells=1.0)

GATES = {
    "fp32": Gate(cosine=1e-6, logit=1e-4, score=1e-5, tie=1e-4, cells=1.0),
    "fp16": Gate(
        cosine=2e-2, logit=5e-2, score=5e-2, tie=NEAR_TIE, cells=0.995, all_cells=0.9, others=tolerances("fp16")
    ),
    "bf16": Gate(
        cosine=5e-2, logit=1e-1, score=1e-1, tie=NEAR_TIE, cells=0.995, all_cells=0.7, others=tolerances("bf16")
    ),
    "int8": Gate(
        cosine=2e-1, logit=3e-1, score=3e-1, tie=NEAR_TIE, cells=0.97, all_cells=0.3, others=tolerances("int8")
    ),
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
        """Whether the share is shown to meet the requirement."""
        return self.low >= self.required

    @property
    def refuted(self) -> bool:
        """Whether the share is shown to miss the requirement."""
        return self.high < self.required


def compute_totals(outputs: Outputs, metadata: Metadata) -> Any:
    """Return the totals [N, C], float64, that follow from the scores: cosines, or logits relative to their scale."""
    totals = find_totals(cast(FloatArray, outputs.scores), metadata)
    return totals / total_scale(metadata)


def total_scale(metadata: Metadata) -> float:
    """Return the divisor that makes totals comparable with a gate's `cosine`: 1, or a linear head's scale.

    That scale is the largest effect of all of a class's weights together on its logit per unit of score, at least 1;
    of a classifier's slots, whose scores have the size of its logits, that size.
    """
    if metadata.is_opal:
        return 1.0
    if not metadata.shares_prototypes:
        return max(1.0, float(metadata.head.get("scale", 1.0)))
    return max(1.0, float(np.abs(metadata.class_map.matrix).sum(axis=1).max()))


def logit_slack(exact: Outputs, metadata: Metadata, score: float) -> Any:
    """Return by how much logits may differ because of distances that differ by `score`, float64 [N, C].

    Only prototypes whose distance is near 0 count, where the logarithm of a distance head is steep; 0 for other heads.
    """
    if exact.scores is None or metadata.head_kind != "distance" or not np.isfinite(score):
        return np.zeros_like(exact.logits, np.float64)
    distances = to_distances(exact.scores, metadata)
    steep = np.where(distances < _NEAR_ZERO, 1.0 / (distances + metadata.epsilon), 0.0)
    return score * steep @ np.abs(metadata.class_map.matrix).T


def score_differences(exact: Outputs, other: Outputs, metadata: Metadata) -> Any:
    """Return the differences of the scores, float64 [N, K]; of a distance head, of the distances they come from."""
    before, after = cast(FloatArray, exact.scores), cast(FloatArray, other.scores)
    if metadata.head_kind == "distance":
        return np.abs(to_distances(before, metadata) - to_distances(after, metadata))
    difference = np.abs(before.astype(np.float64) - after)
    return difference if metadata.is_opal or metadata.shares_prototypes else difference / total_scale(metadata)
