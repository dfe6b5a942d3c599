"""The outputs of a model for a batch, which every session returns and every gate compares (docs/contract.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

# inside both logarithms of the kl distance, as the authors do
KL_EPSILON = 1e-8
_NORM_ROWS = 8


@dataclass(frozen=True)
class Outputs:
    """The outputs of one batch of N images.

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
        """Return the outputs of images start ... stop-1, as views."""

        def cut(array: NDArray[np.generic] | None) -> NDArray[np.generic] | None:
            return None if array is None else array[start:stop]

        return Outputs(cut(self.logits), cut(self.argmax), cut(self.scores), cut(self.attention))  # type: ignore[arg-type]

    def take(self, rows: Sequence[int]) -> Outputs:
        """Return the outputs of some images, in that order; views where these are the first ones."""
        if list(rows) == list(range(len(rows))):
            return self.rows(0, len(rows))

        def pick(array: NDArray[np.generic] | None) -> NDArray[np.generic] | None:
            return None if array is None else array[list(rows)]

        return Outputs(pick(self.logits), pick(self.argmax), pick(self.scores), pick(self.attention))  # type: ignore[arg-type]

    @staticmethod
    def concatenate(parts: Sequence[Outputs]) -> Outputs:
        """Return the outputs of consecutive batches of one model as one."""

        def join(name: str) -> NDArray[np.generic] | None:
            arrays = [getattr(part, name) for part in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        return Outputs(*(join(name) for name in ("logits", "argmax", "scores", "attention")))  # type: ignore[arg-type]


def embedding(scores: FloatArray, epsilon: float) -> DoubleArray:
    """Return z = s / (|s| + epsilon) for scores s [N, K]: float64 [N, K], so that no rounding is added."""
    z: DoubleArray = scores.astype(np.float64) / embedding_norms(scores, epsilon)[:, None]
    return z


def embedding_norms(scores: FloatArray, epsilon: float) -> DoubleArray:
    """Return |s| + epsilon for scores s [N, K]: float64 [N]."""
    # some rows at a time: large temporary arrays cost ten times the arithmetic
    norms = [
        np.linalg.norm(scores[start : start + _NORM_ROWS].astype(np.float64), axis=1)
        for start in range(0, len(scores), _NORM_ROWS)
    ]
    return np.concatenate(norms) + epsilon if norms else np.empty(0)


def cosines(scores: FloatArray, prototypes_per_class: int, epsilon: float) -> DoubleArray:
    """Return the cosine <z, a_c> of every class for scores [N, K]: float64 [N, C], from block sums."""
    blocks = embedding(scores, epsilon).reshape(len(scores), -1, prototypes_per_class)
    sums: DoubleArray = blocks.sum(axis=2) / np.sqrt(prototypes_per_class)
    return sums
