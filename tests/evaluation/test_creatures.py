"""The generated set in `evaluate`: its annotations are found, and boxes are judged by them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import pointing
from opal_deploy.evaluation.metrics import compute_metrics
from opal_deploy.evaluation.pointing import count_box_hits, summarize_hits
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.synthetic import generate_dataset, read_annotations

GRID = (4, 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    root = tmp_path_factory.mktemp("creatures") / "data"
    generate_dataset(root, num_species=3, train_per_class=2, val_per_class=1, test_per_class=3, size=(64, 64))
    return read_dataset(root)


def _measured(cells: np.ndarray, labels: np.ndarray, answers: np.ndarray) -> EvaluationResult:
    logits = -np.ones((len(labels), 3), np.float32)
    logits[np.arange(len(labels)), answers] = -0.1
    outputs = Outputs(logits, cells.astype(np.int32), np.full(cells.shape, 0.5, np.float32))
    return EvaluationResult(compute_metrics(logits, labels), None, labels, outputs)


METADATA = Metadata(
    ("a", "b", "c"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", GRID, (64, 64)
)  # fmt: skip


def test_annotations_are_found_row_for_row(data: DataSet) -> None:
    found = pointing.match_annotations(data, data.test[::-1])

    assert pointing.has_annotations(data)
    assert [data.root / annotation.image for annotation in found] == [sample.path for sample in data.test[::-1]]
    assert not pointing.has_annotations(replace(data, root=data.root / "train"))


def test_a_picture_that_is_not_annotated_is_named(data: DataSet) -> None:
    other = replace(data.test[0], path=data.root / "test" / "new.png")
    with pytest.raises(UsageError, match=r"no annotation of test/new\.png; take the image out"):
        pointing.match_annotations(data, [other])


def test_boxes_of_right_answers_are_judged_as_the_demo_judges_them(data: DataSet) -> None:
    labels = np.array([sample.label for sample in data.test])
    cells = np.random.default_rng(0).integers(0, 16, (len(labels), 6))
    answers = labels.copy()
    answers[0] = (labels[0] + 1) % 3
    annotations = pointing.match_annotations(data, data.test)
    found = pointing.evaluate_part_coverage(_measured(cells, labels, answers), annotations, METADATA)

    hits = []
    for row in range(1, len(labels)):
        places = [divmod(int(cell), 4) for cell in cells[row, labels[row] * 2 : labels[row] * 2 + 2]]
        boxes = [[col * 16, r * 16, col * 16 + 16, r * 16 + 16] for r, col in places]
        hits.append(count_box_hits(annotations[row], boxes, GRID))
    assert found == summarize_hits(hits)
    assert found is not None
    assert (found.images, found.boxes) == (8, 16)

    header, rows = pointing.part_coverage_table(found)
    assert header[:2] == ["species", "slot"]
    assert [row[:2] for row in rows] == [[species, slot] for species in found.slots for slot in (0, 1)]
    for row in rows:
        assert sum(float(share) for share in row[2:]) == pytest.approx(1.0)
    assert len(list(pointing.format_part_coverage(found))) == 1 + 3


def test_boxes_on_the_parts_are_found_to_be_there(data: DataSet) -> None:
    labels = np.array([sample.label for sample in data.test])
    annotations = pointing.match_annotations(data, data.test)
    # every slot looks at the cell that holds the centre of a distinguishing part
    cells = np.zeros((len(labels), 6), np.int64)
    for row, annotation in enumerate(annotations):
        part = next(part for part in annotation.parts.values() if part.distinguishing and part.visible)
        cells[row] = int(part.centre[1] // 16) * 4 + int(part.centre[0] // 16)
    found = pointing.evaluate_part_coverage(_measured(cells, labels, labels), annotations, METADATA)

    assert found is not None
    assert found.any_part == 1.0
    assert found.distinguishing > found.control_distinguishing


def test_without_right_answers_or_single_cells_there_is_nothing_to_judge(data: DataSet) -> None:
    labels = np.array([sample.label for sample in data.test])
    annotations = read_annotations(data.root)[-len(labels) :]
    cells = np.zeros((len(labels), 6), np.int64)

    assert pointing.evaluate_part_coverage(_measured(cells, labels, (labels + 1) % 3), annotations, METADATA) is None
    assert (
        pointing.evaluate_part_coverage(
            _measured(cells, labels, labels), annotations, replace(METADATA, evidence="map")
        )
        is None
    )
