"""Which slots are suspected, from scores and cells as a planted shortcut leaves them."""

from pathlib import Path

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import Sample
from opal_deploy.editing.data import ScoredData
from opal_deploy.editing.scores import Scores
from opal_deploy.editing.suggestions import suggest_slots
from opal_deploy.evaluation.annotations import Annotations, ImageAnnotation
from opal_deploy.preprocess.geometry import Geometry

GRID, IMAGES = (8, 8), 20
METADATA = Metadata(
    ("a", "b"), 4, {"distance": "l2", "epsilon": 1e-8, "dropped": []}, "exact", "resnet18", GRID, (64, 64)
)
MIDDLE, CORNER, BORDER = 3 * 8 + 3, 0, 4


def test_each_kind_of_shortcut_is_named_and_slots_on_the_object_are_left_alone():
    labels = np.repeat([0, 1], IMAGES // 2)
    scores = np.full((IMAGES, 8), 0.5, np.float32)
    cells = np.full((IMAGES, 8), MIDDLE, np.int32)
    # a/1 reads a stamp where there is one, and elsewhere, weakly, something else
    cells[::5, 1], scores[:, 1] = CORNER, 0.05
    scores[::5, 1] = 0.9
    cells[:, 2] = BORDER
    # a/3 sees what a/0 sees, b/1 fires on empty images, and b/2 makes half of class a wrong
    scores[:, 3] = 0.4
    cells[:, 5:] = [MIDDLE + 1, MIDDLE + 8, MIDDLE + 9]
    scores[: IMAGES // 2, 4:] = 0.2
    scores[: IMAGES // 2, 6] = 1.9
    background = np.full((10, 8), 0.1, np.float32)
    background[:, 1], background[:, 5] = 0.01, 0.6
    annotation = ImageAnnotation("a", ((16.0, 16.0, 48.0, 48.0),))
    data = ScoredData(
        Scores(METADATA, scores, labels), cells, [Sample(Path("x"), label) for label in labels.tolist()],
        [Geometry.whole(64, 64)] * IMAGES, Annotations([annotation] * IMAGES, "cells"), background, Path(),
    )  # fmt: skip
    found = {each.name: {reason.kind for reason in each.reasons} for each in suggest_slots(data)}
    assert found == {
        "a/1": {"corner", "object"}, "a/2": {"border", "object"}, "a/3": {"redundant"},
        "b/1": {"background"}, "b/2": {"wrong"},
    }  # fmt: skip
    assert [each.suspected for each in suggest_slots(data)] == [True] * 4 + [False]
