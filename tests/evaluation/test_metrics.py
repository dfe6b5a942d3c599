"""Figures, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opal_deploy.evaluation.metrics import (
    Evaluation,
    accuracy,
    collapse_per_image,
    compute_metrics,
    confusion_matrix,
    cross_entropy,
    macro_f1,
    spatial_prototype_collapse,
    top_k_accuracy,
)


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


def test_collapse_is_the_papers_formula() -> None:
    """SPC(x) = 1 - (|{(u_k, v_k): k in K_c}| - 1) / (|K_c| - 1), word by word."""
    rng = np.random.default_rng(0)
    for m in (2, 3, 5, 10):
        argmax = rng.integers(0, 9, (40, 6 * m), dtype=np.int32)
        labels = rng.integers(0, 6, 40)
        expected = []
        for cells, label in zip(argmax, labels, strict=True):
            places = {divmod(int(cells[k]), 3) for k in range(label * m, label * m + m)}
            expected.append(1 - (len(places) - 1) / (m - 1))
        assert collapse_per_image(argmax, labels, m) == pytest.approx(np.array(expected))
        assert spatial_prototype_collapse(argmax, labels, m) == pytest.approx(np.mean(expected))


def test_top_k_counts_labels_among_the_largest() -> None:
    logits = np.array([[3.0, 2.0, 1.0, 0.0]] * 4, np.float32)
    labels = np.array([0, 1, 2, 3])
    assert [top_k_accuracy(logits, labels, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_top_k_gives_ties_to_the_lower_class_as_the_answer_does() -> None:
    logits = np.zeros((2, 3), np.float32)
    labels = np.array([1, 2])
    assert top_k_accuracy(logits, labels, 2) == 0.5
    assert top_k_accuracy(logits, labels, 1) == accuracy(logits, labels) == 0.0


# truth 0: answered 0 0 1; truth 1: answered 1; truth 2: answered 0
ANSWERS = np.eye(4, dtype=np.float32)[[0, 0, 1, 1, 0]]
TRUTHS = np.array([0, 0, 0, 1, 2])


def test_confusion_has_truths_in_rows() -> None:
    assert confusion_matrix(ANSWERS, TRUTHS).tolist() == [[2, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_macro_f1_weighs_classes_alike() -> None:
    # 0: 2*2 / (2*2 + 1 + 1); 1: 2*1 / (2*1 + 1 + 0); 2: none; 3 never occurs and has no say
    assert macro_f1(ANSWERS, TRUTHS) == pytest.approx((4 / 6 + 2 / 3 + 0) / 3)


class TestFigures:
    def test_collapse_has_its_spread_over_pictures(self) -> None:
        argmax = np.array([[1, 1, 4, 5], [1, 1, 4, 5]], np.int32)
        found = compute_metrics(ANSWERS[:2, :2], np.array([0, 1]), argmax, 2)
        assert (found.spatial_prototype_collapse, found.spatial_prototype_collapse_std) == (0.5, 0.5)

    def test_top_5_of_five_classes_says_nothing(self) -> None:
        labels = np.zeros(3, np.int64)
        assert compute_metrics(np.eye(3, 5, dtype=np.float32), labels).top5 is None
        assert compute_metrics(np.eye(3, 6, dtype=np.float32), labels).top5 == 1.0

    def test_what_there_is_not_is_left_out_of_the_document(self) -> None:
        found = compute_metrics(ANSWERS, TRUTHS).to_dict("val")
        assert list(found) == ["val_accuracy", "val_macro_f1", "val_loss", "val_images"]
        assert found["val_accuracy"] == 0.6
        assert Evaluation(6, 0.5, 0.5).to_dict("test") == {"test_accuracy": 0.5, "test_loss": 0.5, "test_images": 6}
