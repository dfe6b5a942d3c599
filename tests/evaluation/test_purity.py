"""Part purity by hand."""

from __future__ import annotations

import numpy as np
import pytest

from opal_deploy.evaluation.parts import TOP, merge_sides, patch_boxes, purity_by_channel

GRID = (7, 7)
# beyond every patch
NOWHERE = (-9.0, -9.0)


def _purity(
    points: list[list[tuple[float, float]]],
    visible: list[list[bool]],
    names: tuple[str, ...],
    *,
    scores: list[float] | None = None,
    cells: list[int] | None = None,
) -> float:
    """Of one channel, which looks at cell 0 unless told otherwise."""
    count = len(points)
    found = purity_by_channel(
        np.array(scores or [1.0] * count, np.float32)[:, None],
        np.array(cells or [0] * count, np.int32)[:, None],
        GRID,
        np.array(points),
        np.array(visible),
        names,
    )
    assert found.shape == (1,)
    return float(found[0])


class TestPatches:
    def test_on_the_papers_grid_a_patch_is_the_cell(self) -> None:
        assert patch_boxes(np.array([0, 9, 48]), GRID).tolist() == [
            [0, 0, 32, 32],
            [64, 32, 96, 64],
            [192, 192, 224, 224],
        ]

    def test_finer_grids_overlap_and_end_at_the_edge(self) -> None:
        # round(192 / 27) = 7 pixels a step; 27 steps are 189, and the last patch ends at 224 all the same
        found = patch_boxes(np.array([1 * 28 + 26, 27 * 28 + 27]), (28, 28))
        assert found.tolist() == [[182, 7, 214, 39], [192, 192, 224, 224]]

    def test_a_single_cell_takes_the_last_patch(self) -> None:
        assert patch_boxes(np.array([0]), (1, 1)).tolist() == [[192, 192, 224, 224]]


class TestPurity:
    @pytest.mark.parametrize(
        ("point", "expected"),
        [((0.0, 0.0), 1.0), ((32.0, 32.0), 1.0), ((32.01, 0.0), 0.0), ((0.0, -0.01), 0.0)],
    )
    def test_edges_are_inside_and_fractions_count(self, point: tuple[float, float], expected: float) -> None:
        assert _purity([[point]], [[True]], ("beak",)) == expected

    def test_it_is_the_best_parts_share_of_the_pictures_that_show_it(self) -> None:
        inside, outside = (5.0, 5.0), (100.0, 100.0)
        points = [[inside, outside], [outside, inside], [inside, inside], [outside, inside]]
        # beak: 2 of 4; tail: 2 of 3, being invisible on the last image
        visible = [[True, True], [True, True], [True, True], [True, False]]
        assert _purity(points, visible, ("beak", "tail")) == pytest.approx(2 / 3)

    def test_without_a_visible_part_it_is_zero(self) -> None:
        assert _purity([[(5.0, 5.0)]] * 3, [[False]] * 3, ("beak",)) == 0.0

    def test_ten_pictures_of_the_highest_scores_count(self) -> None:
        inside = [[(5.0, 5.0)]] * TOP
        outside = [[NOWHERE]] * 5
        scores = [0.1] * 5 + [0.9] * TOP
        assert _purity(outside + inside, [[True]] * 15, ("beak",), scores=scores) == 1.0

    def test_of_equal_scores_the_earlier_picture_counts(self) -> None:
        inside, outside = [[(5.0, 5.0)]] * TOP, [[NOWHERE]] * 5
        assert _purity(inside + outside, [[True]] * 15, ("beak",)) == 1.0
        assert _purity(outside + inside, [[True]] * 15, ("beak",)) == 0.5

    def test_the_patch_is_at_each_pictures_own_cell(self) -> None:
        points = [[(100.0, 40.0)], [(40.0, 100.0)]]
        assert _purity(points, [[True]] * 2, ("beak",), cells=[1 * 7 + 3, 3 * 7 + 1]) == 1.0
        assert _purity(points, [[True]] * 2, ("beak",), cells=[3 * 7 + 1, 1 * 7 + 3]) == 0.0

    def test_left_and_right_are_one_part(self) -> None:
        points = [[(5.0, 5.0), NOWHERE], [NOWHERE, (5.0, 5.0)]]
        assert _purity(points, [[True, True]] * 2, ("left eye", "right eye")) == 1.0
        assert _purity(points, [[True, True]] * 2, ("left eye", "right leg")) == 0.5

    def test_a_side_that_is_not_visible_is_not_there(self) -> None:
        # the left eye's patch holds it, but it is hidden; the right one is visible elsewhere
        assert _purity([[(5.0, 5.0), NOWHERE]], [[False, True]], ("left eye", "right eye")) == 0.0


def test_merged_parts_keep_the_order_of_their_first_mention() -> None:
    names = ("back", "left eye", "nape", "right eye")
    present = np.array([[False, False, True, True]])
    visible = np.array([[True, False, True, True]])
    merged, seen = merge_sides(names, present, visible)
    assert merged.tolist() == [[False, True, True]]
    assert seen.tolist() == [[True, True, True]]
