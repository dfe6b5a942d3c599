import math

import numpy as np
import pytest

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines, embedding
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo
from opal_deploy.visualization.sheet.content import build_sheet_content

GRID = (7, 7)
IMAGE = ImageInfo("a.jpg", Geometry.whole(700, 350))
CLASSES = ("ash", "birch", "oak")


def metadata(m, distance="l2", evidence="exact", classes=CLASSES):
    head = {"distance": distance, "epsilon": 1e-8}
    return Metadata(tuple(classes), m, head, evidence, "resnet18", GRID, (224, 224))


def outputs(m, seed=0, classes=3):
    """Return a forward pass with CWS for one image, with the first class favoured."""
    generator = np.random.default_rng(seed)
    concentration = np.full(classes * m, 0.05)
    concentration[:m] = 0.2
    attention = generator.dirichlet(concentration, size=(1, 49)).transpose(0, 2, 1).astype(np.float32)
    scores, cells = attention.max(axis=2), attention.argmax(axis=2).astype(np.int32)
    logits = -np.sqrt(2 - 2 * cosines(scores, ClassMap.blocks(scores.shape[1] // m, m), 1e-8)).astype(np.float32)
    return Outputs(logits, cells, scores)


def content(m=5, *, seed=0, distance="l2", **how):
    return build_sheet_content(IMAGE, outputs(m, seed), metadata(m, distance), **how)


def of_scores(own, other, cells=None):
    """Two classes whose slots' scores are given, unit length together."""
    m = len(own)
    scores = np.array([[*own, *other]], dtype=np.float32)
    where = np.array([[*(cells or range(m)), *range(20, 20 + m)]], dtype=np.int32)
    logits = -np.sqrt(2 - 2 * cosines(scores, ClassMap.blocks(scores.shape[1] // m, m), 1e-8)).astype(np.float32)
    return build_sheet_content(IMAGE, Outputs(logits, where, scores), metadata(m, classes=("a", "b")))


@pytest.mark.parametrize("m", [1, 5, 10])
def test_the_bars_of_both_classes_add_up_to_their_cosines(m):
    found, given = content(m), outputs(m)
    cosine = cosines(given.scores, ClassMap.blocks(given.scores.shape[1] // m, m), 1e-8)[0]
    for view in (found.predicted, found.runner_up):
        assert math.fsum(slot.value for slot in view.slots) == pytest.approx(cosine[view.class_id], abs=1e-6)
        assert view.total == pytest.approx(view.cosine, abs=1e-6)


def test_the_runner_up_is_the_second_logit_and_its_evidence_is_what_the_outputs_say():
    found, given = content(5, seed=3), outputs(5, 3)
    order = np.argsort(-given.logits[0])
    assert (found.predicted.class_id, found.runner_up.class_id) == (order[0], order[1])
    z = embedding(given.scores, 1e-8)[0]
    for view in (found.predicted, found.runner_up):
        for slot in view.slots:
            channel = view.class_id * 5 + slot.slot
            row, col = divmod(int(given.argmax[0, channel]), 7)
            assert (slot.channel, slot.cell) == (channel, (row, col))
            assert slot.score == given.scores[0, channel]
            assert slot.contribution == pytest.approx(z[channel] / math.sqrt(5), abs=1e-12)
            assert slot.box == (100.0 * col, 50.0 * row, 100.0 * col + 100, 50.0 * row + 50)


def test_slots_stand_in_the_order_of_their_strength_on_one_scale_for_both_classes():
    found = of_scores([0.1, 0.8, 0.3], [0.1, 0.2, 0.15])
    for view in (found.predicted, found.runner_up):
        assert [slot.slot for slot in view.slots] == [1, 2, 0]
    found = of_scores([0.6, 0.4], [0.4, 0.2])
    # the score that both have
    assert len({slot.stop - slot.start for slot in (found.predicted.slots[1], found.runner_up.slots[0])}) == 1


@pytest.mark.parametrize("distance", ["linf", "tropical"])
def test_a_distance_without_contributions_has_no_sum_and_shows_scores(distance):
    found = content(4, distance=distance)
    assert (found.meaning, found.predicted.total) == ("score", None)
    assert all(slot.value == slot.score and slot.contribution is None for slot in found.predicted.slots)


def test_a_distance_of_parts_shows_their_sum():
    found = content(4, distance="l1")
    z = embedding(outputs(4).scores, 1e-8).reshape(3, 4)[found.predicted.class_id]
    assert found.predicted.total == pytest.approx(np.abs(z - 0.5).sum(), abs=1e-9)


def test_slots_that_chose_one_cell_are_a_reason_to_doubt_the_answer():
    found = of_scores([0.5, 0.5, 0.5], [0.1, 0.1, 0.1], cells=[4, 4, 4])
    assert found.predicted.distinct_cells == 1
    assert all(slot.shared for slot in found.predicted.slots)
    assert any("one place" in caution for caution in found.cautions())
    two = of_scores([0.5, 0.5, 0.5], [0.1, 0.1, 0.1], cells=[4, 9, 4])
    assert two.predicted.distinct_cells == 2
    assert [slot.shared for slot in two.predicted.slots] == [True, False, True]
    assert two.cautions() == []


def test_a_model_of_one_class_has_no_runner_up():
    found = build_sheet_content(IMAGE, outputs(3, classes=1), metadata(3, classes=("only",)))
    assert (found.runner_up, found.margin) == (None, None)


@pytest.mark.parametrize("evidence", ["map", "none"])
def test_there_is_no_sheet_where_no_cell_decided(evidence):
    with pytest.raises(ValueError, match="single cells"):
        build_sheet_content(IMAGE, outputs(3), metadata(3, evidence=evidence))


def test_the_document_for_programs_has_names_and_no_maps():
    found = content(3, names={(content(3).predicted.class_id, 1): "beak"})
    document = found.to_dict()
    slots = document["predicted"]["slots"]
    assert {slot["slot"]: slot["name"] for slot in slots} == {0: None, 1: "beak", 2: None}
    assert document["margin"] == found.margin
