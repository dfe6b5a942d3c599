"""Metrics by hand, margins beside those of the records."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.evaluation.metrics import (
    ClassCounts,
    Evaluation,
    collapse_of_cells,
    compute_metrics,
    count_by_class,
    format_classes,
)
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo, build_records
from opal_deploy.train.checkpoints import LabelledOutputs

METADATA = Metadata(("a", "b"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 4), (32, 32))


@pytest.mark.parametrize(
    ("cells", "labels", "m", "mean", "deviation"),
    [
        ([[3, 8, 12, 0, 48]], [0], 5, 0.0, 0.0),
        ([[7, 7, 7, 7, 7]], [0], 5, 1.0, 0.0),
        ([[9, 7, 9, 8, 7]], [0], 5, 0.5, 0.0),
        ([[1, 1, 4, 5]] * 2, [0, 1], 2, 0.5, 0.5),
        ([[4, 4, 4]], [1], 1, 0.0, 0.0),
    ],
    ids=["five cells", "one cell", "three, apart", "own classes", "one prototype"],
)
def test_collapse_counts_different_cells_of_the_true_class(cells, labels, m, mean, deviation):
    slots, labels = ClassMap.blocks(max(labels) + 1, m), np.array(labels)
    collapse = collapse_of_cells(slots.take(np.array(cells, np.int32), labels), labels, slots)
    metrics = compute_metrics(np.eye(3, dtype=np.float32)[labels], labels, collapse)
    assert metrics.spatial_prototype_collapse == pytest.approx(mean)
    assert metrics.spatial_prototype_collapse_std == pytest.approx(deviation)


def test_cross_entropy_is_that_of_torch():
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((20, 7)) * 30).astype(np.float32)
    labels = rng.integers(0, 7, 20)
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)).item()
    assert compute_metrics(logits, labels).loss == pytest.approx(expected, rel=1e-5)


def test_the_fifth_class_counts_and_the_lower_of_equal_logits_is_preferred():
    falling = np.tile(np.arange(7, dtype=np.float32)[::-1], (7, 1))
    assert compute_metrics(falling, np.arange(7)).top5 == pytest.approx(5 / 7)
    assert compute_metrics(np.zeros((7, 7), np.float32), np.arange(7)).top5 == pytest.approx(5 / 7)
    assert [compute_metrics(np.zeros((1, 7), np.float32), np.array([label])).top5 for label in (4, 5)] == [1.0, 0.0]
    assert compute_metrics(np.eye(3, 5, dtype=np.float32), np.zeros(3, np.int64)).top5 is None


# label 0: predicted 0 0 1; label 1: predicted 1; label 2: predicted 0
PREDICTIONS = np.eye(4, dtype=np.float32)[[0, 0, 1, 1, 0]]
LABELS = np.array([0, 0, 0, 1, 2])


def test_macro_f1_weighs_classes_alike_and_metrics_that_were_not_measured_are_left_out():
    metrics = compute_metrics(PREDICTIONS, LABELS).to_dict("val")
    assert list(metrics) == ["val_accuracy", "val_macro_f1", "val_loss", "val_images"]
    assert metrics["val_accuracy"] == 0.6
    # 0: 2*2 / (2*2 + 1 + 1); 1: 2*1 / (2*1 + 1 + 0); 2: none; 3 never occurs and does not count
    assert metrics["val_macro_f1"] == pytest.approx((4 / 6 + 2 / 3 + 0) / 3)
    few = Evaluation(images=6, loss=0.5, accuracy=0.5)
    assert few.to_dict("test") == {"test_accuracy": 0.5, "test_loss": 0.5, "test_images": 6}


def test_margins_are_those_of_the_records():
    generator = np.random.default_rng(0)
    scores = generator.uniform(size=(20, 8)).astype(np.float32)
    logits = generator.normal(size=(20, 4)).astype(np.float32)
    logits[0] = 0.0  # equal ones: the lowest classes
    metadata = replace(METADATA, class_names=("a", "b", "c", "d"), grid=(2, 2), input_size=(8, 8))
    outputs = Outputs(logits, np.zeros((20, 8), np.int32), scores)
    records = build_records([ImageInfo("x", Geometry.whole(8, 8))] * 20, outputs, metadata)

    expected = [record.margin for record in records]
    config = NetworkConfig("resnet18", 4, (8, 8), HeadConfig(prototypes_per_class=2))
    assert LabelledOutputs.of(outputs, np.zeros(20, np.int64), config).margins.tolist() == expected


def test_classes_that_are_never_predicted_come_first():
    logits = np.eye(3, dtype=np.float32)[[0, 0, 0, 1, 0]]
    counts = count_by_class(logits, np.array([0, 0, 2, 2, 1]), ["gull", "tern", "auk"])
    assert counts == [
        ClassCounts("gull", images=2, correct=2, predicted=4),
        ClassCounts("tern", images=1, correct=0, predicted=1),
        ClassCounts("auk", images=2, correct=0, predicted=0),
    ]
    assert list(format_classes(counts)) == [
        "Never predicted: auk (2 images)",
        "Accuracy by class: tern 0 of 1, gull 2 of 2",
    ]
