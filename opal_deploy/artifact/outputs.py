"""What a model answers for a batch: the arrays that every session returns and every gate compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class Outputs:
    """One batch's answers.

    Attributes:
        logits: float32 [N, C], minus the distance to each class's anchor (paper, Eq. 4).
        argmax: int32 [N, K], flat row-major cell of each channel's maximum; None for `evidence: none`.
        scores: float32 [N, K], each channel's pooled attention (paper, Eq. 3); None for `evidence: none`.
        attention: float32 [N, K, H, W], only where the graph was exported with it.
    """

    logits: FloatArray
    argmax: IntArray | None = None
    scores: FloatArray | None = None
    attention: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.logits)

    def rows(self, start: int, stop: int) -> Outputs:
        """The answers of images start ... stop-1, as views."""

        def cut(array: NDArray[np.generic] | None) -> NDArray[np.generic] | None:
            return None if array is None else array[start:stop]

        return Outputs(cut(self.logits), cut(self.argmax), cut(self.scores), cut(self.attention))  # type: ignore[arg-type]

    @staticmethod
    def concatenate(parts: Sequence[Outputs]) -> Outputs:
        """Joins the answers of consecutive batches of one model."""

        def join(name: str) -> NDArray[np.generic] | None:
            arrays = [getattr(part, name) for part in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        return Outputs(*(join(name) for name in ("logits", "argmax", "scores", "attention")))  # type: ignore[arg-type]


def embedding(scores: FloatArray, epsilon: float) -> DoubleArray:
    """z = s / (|s| + epsilon): float64 [N, K] from scores [N, K]; float64 so that it adds no rounding of its own."""
    wide = scores.astype(np.float64)
    z: DoubleArray = wide / (np.linalg.norm(wide, axis=1, keepdims=True) + epsilon)
    return z


def cosines(scores: FloatArray, prototypes_per_class: int, epsilon: float) -> DoubleArray:
    """<z, a_c> for every class: float64 [N, C] from scores [N, K]; block sums, no [K, C] product."""
    blocks = embedding(scores, epsilon).reshape(len(scores), -1, prototypes_per_class)
    sums: DoubleArray = blocks.sum(axis=2) / np.sqrt(prototypes_per_class)
    return sums
