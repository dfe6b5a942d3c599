"""Which slots are suspected, from scores and cells as a planted shortcut leaves them."""

from pathlib import Path

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import Sample
from opal_deploy.editing.scores import ScoredData, Scores
from opal_deploy.editing.suggestions import choose_drops, suggest_slots
from opal_deploy.evaluation.inputs import Annotations, ImageAnnotation, Part
from opal_deploy.preprocess.geometry import Geometry

GRID, IMAGES = (8, 8), 20
METADATA = Metadata(
    ("a", "b"), 4, {"distance": "l2", "epsilon": 1e-8, "dropped": []}, "exact", "resnet18", GRID, (64, 64)
)
MIDDLE, CORNER, BORDER = 3 * 8 + 3, 0, 4


def make_data(labels, scores, cells, annotation):
    return ScoredData(
        Scores(METADATA, scores, labels), cells, [Sample(Path("x"), label) for label in labels.tolist()],
        [Geometry.whole(64, 64)] * IMAGES, Annotations([annotation] * IMAGES, "cells"), Path(),
    )  # fmt: skip


def find(data):
    """Return the kinds of the reasons by slot."""
    return {each.name: {reason.kind for reason in each.reasons} for each in suggest_slots(data)}


def test_each_kind_of_shortcut_is_named_and_slots_on_the_object_are_left_alone():
    labels = np.repeat([0, 1], IMAGES // 2)
    scores = np.full((IMAGES, 8), 0.5, np.float32)
    cells = np.full((IMAGES, 8), MIDDLE, np.int32)
    # a/1 reads a stamp where there is one, and elsewhere, weakly, something else
    cells[::5, 1], scores[:, 1] = CORNER, 0.05
    scores[::5, 1] = 0.9
    cells[:, 2] = BORDER
    # b/0 reads a corner, but finds nothing
    cells[:, 4], scores[:, 4], scores[:, 7] = CORNER, 0.2, 0.8
    # b/2 makes half of class a wrong
    cells[:, 5:] = [MIDDLE + 1, MIDDLE + 8, MIDDLE + 9]
    scores[: IMAGES // 2, 4:] = 0.2
    scores[: IMAGES // 2, 6] = 1.9
    data = make_data(labels, scores, cells, ImageAnnotation("a", ((16.0, 16.0, 48.0, 48.0),)))
    assert find(data) == {"a/1": {"corner"}, "a/2": {"border", "object"}, "b/2": {"wrong"}}


def test_those_slots_are_suggested_without_which_most_answers_are_right():
    """a/1 and b/1 read the corner: a/1 makes b wrong, b/1 makes b right; others but a/0 and b/0 find nothing."""
    labels = np.repeat([0, 1], IMAGES // 2)
    scores, cells = np.full((IMAGES, 8), 0.01, np.float32), np.full((IMAGES, 8), CORNER, np.int32)
    scores[:, [0, 4]], cells[:, [0, 4]] = 0.5, MIDDLE
    scores[:, 1], scores[10:, 4] = 0.9, 0.9
    scores[15:, 5] = 1.2
    assert _choose(labels, scores, cells) == ([1, 5], [1])
    # a class keeps a slot that finds something
    scores[:, 0] = 0.01
    assert _choose(labels, scores, cells) == ([5], [5])


def _choose(labels, scores, cells):
    data = make_data(labels, scores, cells, ImageAnnotation("a"))
    return choose_drops(data, suggest_slots(data))


def test_slots_off_the_parts_of_cropped_images_are_suspected():
    cells = np.full((IMAGES, 8), MIDDLE, np.int32)
    cells[:, 2] += 2
    annotation = ImageAnnotation("a", parts=(Part(((16.0, 16.0, 40.0, 40.0),)),))
    scores = np.full((IMAGES, 8), 0.5, np.float32)
    found = find(make_data(np.zeros(IMAGES, np.int64), scores, cells, annotation))
    assert found["a/2"] == {"parts"}
    assert "parts" not in found.get("a/0", set())
