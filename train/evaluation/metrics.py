"""Figures of a trained network, from its outputs. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def accuracy(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Share of pictures, 0 ... 1, whose largest logit is their label's.

    Args:
        logits: [N, C], N at least 1.
        labels: [N], class indices.
    """
    return float((logits.argmax(axis=1) == labels).mean())


def cross_entropy(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Mean over pictures of -log softmax(logits)[label], in nats.

    Args:
        logits: [N, C], N at least 1.
        labels: [N], class indices.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_normaliser = np.log(np.exp(shifted).sum(axis=1))
    return float((log_normaliser - shifted[np.arange(len(labels)), labels]).mean())


def spatial_prototype_collapse(
    argmax: NDArray[np.int32], labels: NDArray[np.int64], prototypes_per_class: int
) -> float:
    """Mean SPC (paper, Supp. D.1), 0 ... 1: 0 when a class's slots peak in different cells, 1 when all share one.

    Per picture of class c: 1 - (number of different cells among the true class's m channels - 1) / (m - 1).

    Args:
        argmax: [N, K], flat cell of each channel's maximum, N at least 1.
        labels: [N], true classes.
        prototypes_per_class: m; with one prototype nothing can collapse, and the score is 0.
    """
    m = prototypes_per_class
    if m == 1:
        return 0.0
    channels = labels[:, None] * m + np.arange(m)  # [N, m]
    cells = np.sort(np.take_along_axis(argmax, channels, axis=1), axis=1)
    different = 1 + (np.diff(cells, axis=1) != 0).sum(axis=1)  # [N]
    return float((1.0 - (different - 1) / (m - 1)).mean())
