"""The class map: OPAL's blocks, and prototypes that classes share, against the map written as a matrix."""

import numpy as np
import pytest

from opal_deploy.artifact.class_map import ClassMap, find_margins

# four classes: two share prototype 1 with opposite signs, and the last has no prototype
WEIGHTS = np.array([[0, 2.0, 0, 0.5, 0], [0.25, -1.0, 0, 0, 3.0], [0, 0, 1.5, 0, 0], [0, 0, 0, 0, 0]])
BIASES = np.array([0.0, 0.5, -1.0, 2.0])
SHARED = ClassMap.from_matrix(WEIGHTS, BIASES)
DROPPED = ClassMap.blocks(2, 3, (1, 3, 4))
ANCHORS = [[0.5**0.5, 0, 0.5**0.5, 0, 0, 0], [0, 0, 0, 0, 0, 1]]


def test_slots_share_the_anchor_of_their_class():
    assert DROPPED.counts.tolist() == [2, 1]
    np.testing.assert_allclose(DROPPED.matrix, ANCHORS)
    assert (DROPPED.slots(0), DROPPED.channels(1).tolist()) == ([0, 2], [5])
    np.testing.assert_array_equal(ClassMap.blocks(2, 3).drop([4]).drop([1, 3]).matrix, DROPPED.matrix)
    np.testing.assert_array_equal(DROPPED.with_dropped([]).matrix, ClassMap.blocks(2, 3).matrix)


def test_prototypes_may_be_shared_and_a_class_may_have_none():
    assert (SHARED.num_classes, SHARED.max_slots) == (4, 5)
    assert SHARED.counts.tolist() == [2, 3, 1, 0]
    np.testing.assert_array_equal(SHARED.matrix, WEIGHTS)
    # a shared prototype has the same number in every class
    assert (SHARED.owners(1), SHARED.owners(2)) == ([(0, 1), (1, 1)], [(2, 2)])
    assert (SHARED.channels(1).tolist(), SHARED.slot_of(1, 4), SHARED.locate(9)) == ([0, 1, 4], 4, (1, 4))
    # weights that are not of unit length stay what they are, and a prototype goes for all of its classes
    without = SHARED.drop([1])
    np.testing.assert_array_equal(without.matrix, WEIGHTS * [1, 0, 1, 1, 1])
    assert (without.slots(1), without.counts.tolist()) == ([0, 4], [1, 2, 1, 0])
    assert not without.silenced.any()
    assert without.drop([2]).silenced.tolist() == [False, False, True, False]


@pytest.mark.parametrize("class_map", [ClassMap.blocks(4, 5), ClassMap.blocks(2, 3, (0, 4)), SHARED, SHARED.drop([1])])
def test_contributions_add_up_to_the_product_with_the_matrix(class_map):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((7, class_map.num_prototypes))
    expected = values @ class_map.matrix.T + class_map.biases
    np.testing.assert_allclose(class_map.all_totals(values), expected, rtol=1e-12, atol=1e-12)
    class_ids = rng.integers(0, class_map.num_classes, (7, 3))
    taken = class_map.take(values, class_ids)
    assert taken.shape == (7, 3, class_map.max_slots)
    totals = np.take_along_axis(expected, class_ids, axis=1)
    np.testing.assert_allclose(class_map.totals(taken, class_ids), totals, rtol=1e-12, atol=1e-12)
    parts = class_map.contributions(taken, class_ids)
    np.testing.assert_allclose(parts.sum(axis=2) + class_map.biases[class_ids], totals, rtol=1e-12, atol=1e-12)
    assert not parts[~class_map.kept[class_ids]].any()


def test_a_margin_is_the_lead_over_the_runner_up():
    assert find_margins(np.array([[0.5, 0.25, 0.0], [0.5, 0.75, 0.0]])).tolist() == [0.25, -0.25]
    assert np.isnan(find_margins(np.ones((2, 1)))).all()
