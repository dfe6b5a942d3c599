"""Figures, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opal_deploy.train.evaluation.metrics import accuracy, cross_entropy, spatial_prototype_collapse


def _spc(argmax: list[list[int]], labels: list[int], m: int) -> float:
    return spatial_prototype_collapse(np.array(argmax, np.int32), np.array(labels, np.int64), m)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([3, 8, 12, 0, 48], 0.0),  # five cells: no collapse
        ([7, 7, 7, 7, 7], 1.0),  # one cell: complete collapse
        ([7, 7, 9, 9, 9], 0.75),  # two cells: 1 - 1/4
        ([9, 7, 9, 8, 7], 0.5),  # three cells, not side by side: 1 - 2/4
    ],
)
def test_collapse_counts_different_cells_of_the_class(cells: list[int], expected: float) -> None:
    assert _spc([cells], [0], 5) == pytest.approx(expected)


def test_collapse_looks_at_the_true_class_only() -> None:
    argmax = [[1, 1, 4, 5], [1, 1, 4, 5]]
    assert _spc([argmax[0]], [0], 2) == 1.0
    assert _spc([argmax[0]], [1], 2) == 0.0
    assert _spc(argmax, [0, 1], 2) == 0.5


def test_collapse_of_a_single_prototype_is_zero() -> None:
    assert _spc([[4, 4, 4]], [1], 1) == 0.0


def test_accuracy_is_a_share() -> None:
    logits = np.array([[0.1, 0.2], [0.9, 0.2], [0.3, 0.4], [0.0, 1.0]], np.float32)
    assert accuracy(logits, np.array([1, 0, 0, 1])) == 0.75


def test_cross_entropy_is_torchs() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((20, 7)) * 30).astype(np.float32)
    labels = rng.integers(0, 7, 20)
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)).item()
    assert cross_entropy(logits, labels) == pytest.approx(expected, rel=1e-5)
