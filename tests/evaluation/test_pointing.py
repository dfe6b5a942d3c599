"""Boxes of explanations against the annotated parts of the generated data set, and their control."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import pointing
from opal_deploy.evaluation.metrics import compute_metrics
from opal_deploy.evaluation.pointing import cell_foreground, count_box_hits, summarize_hits
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.synthetic import Annotation, PartBox, build_annotation, draw_creature, generate_dataset, list_species
from opal_deploy.synthetic.dataset import encode_runs

GRID = (4, 4)
METADATA = Metadata(("a", "b", "c"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", GRID, (64, 64))
ON_BEAK, ON_TAIL, ON_BODY, OFF = (20, 20, 40, 40), (40, 40, 60, 60), (40, 20, 60, 40), (0, 0, 20, 20)


def _mask(shape, rows, columns):
    foreground = np.zeros(shape, np.bool_)
    foreground[rows, columns] = True
    return encode_runs(foreground)


# 80 x 80 pixels, a 4 x 4 grid of 20-pixel cells; the creature fills the four cells in the middle
BEAK = PartBox("hook", (22.0, 22.0, 38.0, 38.0), (30.0, 30.0), distinguishing=True, visible=True)
TAIL = PartBox("paddle", (42.0, 42.0, 58.0, 58.0), (50.0, 50.0), distinguishing=False, visible=True)
CREATURE = Annotation("x.png", "x", 80, 80, {"beak": BEAK, "tail": TAIL}, _mask((80, 80), slice(20, 60), slice(20, 60)))


def test_boxes_are_counted_by_the_parts_they_cover():
    hits = count_box_hits(CREATURE, [ON_BEAK, ON_TAIL, ON_BODY, OFF, ON_BEAK], GRID)
    assert (hits.boxes, hits.distinguishing, hits.any_part) == (5, 2, 3)
    assert hits.most_covered == ("beak", "tail", "none", "none", "beak")
    hidden = {"beak": replace(BEAK, visible=False), "tail": TAIL}
    hits = count_box_hits(replace(CREATURE, parts=hidden), [ON_BEAK], GRID)
    assert (hits.distinguishing, hits.any_part, hits.control_distinguishing) == (0, 0, 0)


@pytest.mark.parametrize(
    ("box", "covered"),
    [
        ((22, 22, 30, 30), True),  # exactly a quarter
        ((22, 22, 29.9, 30), False),
        ((0, 0, 80, 80), True),
        ((38, 22, 60, 38), False),  # side by side
    ],
)
def test_a_quarter_of_the_part_is_enough(box, covered):
    assert count_box_hits(CREATURE, [box], GRID).distinguishing == covered


def test_the_control_is_by_cells_of_the_creature():
    hits = count_box_hits(CREATURE, [], GRID)
    assert (hits.control_distinguishing, hits.control_any, hits.boxes) == (1 / 4, 2 / 4, 0)
    # no cell is full enough: the fullest
    tiny = replace(CREATURE, runs=_mask((80, 80), slice(25, 30), slice(25, 30)))
    assert count_box_hits(tiny, [], GRID).control_distinguishing == 1


@pytest.mark.parametrize("grid", [(7, 7), (5, 7), (4, 4), (6, 5)])
def test_control_is_the_mean_over_single_cells(grid):
    """Brute force: ask for every foreground cell by itself, with foreground counted on a mask of finer pixels."""
    kind = list_species(8)[5]
    annotation = build_annotation(draw_creature(kind, np.random.default_rng(3), (160, 224)), "x.png", kind.name)
    mask = annotation.foreground().repeat(grid[0], axis=0).repeat(grid[1], axis=1)
    height, width = annotation.height / grid[0], annotation.width / grid[1]
    covered = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            fine = mask[row * annotation.height :, column * annotation.width :]
            if fine[: annotation.height, : annotation.width].mean() >= 0.25:
                box = [column * width, row * height, (column + 1) * width, (row + 1) * height]
                one = count_box_hits(annotation, [box], grid)
                covered.append((one.distinguishing, one.any_part))
    hits = count_box_hits(annotation, [], grid)
    assert len(covered) > 2
    assert (hits.control_distinguishing, hits.control_any) == pytest.approx(np.mean(covered, axis=0))
    assert 0 < hits.control_distinguishing < hits.control_any


def test_some_cell_covers_each_distinguishing_part():
    grid = [(c * 32.0, r * 32.0, c * 32.0 + 32, r * 32.0 + 32) for r in range(7) for c in range(7)]
    for seed in range(60):
        kind = list_species(8)[seed % 8]
        annotation = build_annotation(draw_creature(kind, np.random.default_rng(seed), (224, 224)), "x.png", kind.name)
        for name in kind.distinguishing:
            only = replace(annotation, parts={name: annotation.parts[name]})
            assert count_box_hits(only, grid, (7, 7)).distinguishing >= 1


def test_cell_foreground_is_exact_where_cells_cut_pixels():
    annotation = Annotation("x.png", "x", 3, 3, {}, _mask((3, 3), slice(1, 2), slice(1, 2)))
    np.testing.assert_allclose(cell_foreground(annotation, (2, 2)), np.full((2, 2), 0.25 / 2.25))


def test_summary_weighs_images_by_their_boxes():
    first = count_box_hits(CREATURE, [ON_BEAK, ON_BEAK, OFF], GRID)
    second = replace(count_box_hits(CREATURE, [OFF], GRID), control_distinguishing=0.75)
    summary = summarize_hits([first, second, count_box_hits(CREATURE, [], GRID)])
    assert (summary.images, summary.boxes) == (3, 4)
    assert (summary.distinguishing, summary.any_part) == (0.5, 0.5)
    assert summary.control_distinguishing == (3 * 0.25 + 0.75) / 4
    assert summary.slots == {"x": [{"beak": 0.5, "none": 0.5}, {"beak": 1.0}, {"none": 1.0}]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(summarize_hits, []), "no boxes"),
        (partial(count_box_hits, CREATURE, [], (0, 7)), "0x7 cells"),
        *[
            (partial(count_box_hits, CREATURE, b, GRID), r"expected \[B, 4\]")
            for b in ([[1, 2, 3]], [1, 2], [[[1] * 4]])
        ],
    ],
)
def test_wrong_boxes_and_grids_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


# the generated data set in `evaluate`


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("creatures") / "data"
    generate_dataset(root, num_species=3, train_per_class=2, val_per_class=1, test_per_class=3, size=(64, 64))
    return read_dataset(root)


def _result(cells, labels, predicted):
    logits = -np.ones((len(labels), 3), np.float32)
    logits[np.arange(len(labels)), predicted] = -0.1
    outputs = Outputs(logits, cells.astype(np.int32), np.full(cells.shape, 0.5, np.float32))
    return EvaluationResult(compute_metrics(logits, labels), None, labels, outputs)


def test_annotations_are_matched_row_for_row(data):
    annotations = pointing.match_annotations(data, data.test[::-1])
    assert [data.root / annotation.image for annotation in annotations] == [sample.path for sample in data.test[::-1]]
    assert pointing.has_annotations(data)
    assert not pointing.has_annotations(replace(data, root=data.root / "train"))
    other = replace(data.test[0], path=data.root / "test" / "new.png")
    with pytest.raises(UsageError, match=r"no annotation of test/new\.png; take the image out"):
        pointing.match_annotations(data, [other])


def test_boxes_of_right_predictions_are_judged_as_the_demo_judges_them(data):
    labels = np.array([sample.label for sample in data.test])
    cells = np.random.default_rng(0).integers(0, 16, (len(labels), 6))
    predicted = labels.copy()
    predicted[0] = (labels[0] + 1) % 3
    annotations = pointing.match_annotations(data, data.test)
    summary = pointing.evaluate_part_coverage(_result(cells, labels, predicted), annotations, METADATA)

    hits = []
    for row in range(1, len(labels)):
        places = [divmod(int(cell), 4) for cell in cells[row, labels[row] * 2 : labels[row] * 2 + 2]]
        boxes = [[col * 16, r * 16, col * 16 + 16, r * 16 + 16] for r, col in places]
        hits.append(count_box_hits(annotations[row], boxes, GRID))
    assert summary == summarize_hits(hits)
    assert summary is not None
    assert (summary.images, summary.boxes) == (8, 16)

    header, rows = pointing.part_coverage_table(summary)
    assert header[:2] == ["species", "slot"]
    assert [row[:2] for row in rows] == [[species, slot] for species in summary.slots for slot in (0, 1)]
    for row in rows:
        assert sum(float(share) for share in row[2:]) == pytest.approx(1.0)
    assert len(list(pointing.format_part_coverage(summary))) == 1 + 3


def test_boxes_on_the_parts_beat_the_control(data):
    labels = np.array([sample.label for sample in data.test])
    annotations = pointing.match_annotations(data, data.test)
    # every slot looks at the cell that holds the centre of a distinguishing part
    cells = np.zeros((len(labels), 6), np.int64)
    for row, annotation in enumerate(annotations):
        part = next(part for part in annotation.parts.values() if part.distinguishing and part.visible)
        cells[row] = int(part.centre[1] // 16) * 4 + int(part.centre[0] // 16)
    summary = pointing.evaluate_part_coverage(_result(cells, labels, labels), annotations, METADATA)
    assert summary is not None
    assert summary.any_part == 1.0
    assert summary.distinguishing > summary.control_distinguishing

    # no right prediction, or no single cells: nothing to judge
    wrong = _result(cells, labels, (labels + 1) % 3)
    assert pointing.evaluate_part_coverage(wrong, annotations, METADATA) is None
    average = replace(METADATA, evidence="map")
    assert pointing.evaluate_part_coverage(_result(cells, labels, labels), annotations, average) is None
