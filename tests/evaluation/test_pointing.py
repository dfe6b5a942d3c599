from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.errors import UsageError
from opal_deploy.evaluation.pointing import cell_foreground, count_box_hits, summarize_hits
from opal_deploy.synthetic import Annotation, PartBox, build_annotation, draw_creature, list_species
from opal_deploy.synthetic.dataset import encode_runs


def made_up() -> Annotation:
    """80x80 pixels, a 4x4 grid of 20-pixel cells; the creature fills the four cells in the middle."""
    foreground = np.zeros((80, 80), dtype=bool)
    foreground[20:60, 20:60] = True
    parts = {
        "beak": PartBox("hook", (22.0, 22.0, 38.0, 38.0), (30.0, 30.0), distinguishing=True, visible=True),
        "tail": PartBox("paddle", (42.0, 42.0, 58.0, 58.0), (50.0, 50.0), distinguishing=False, visible=True),
    }
    return Annotation("test/x/0000.png", "x", 80, 80, parts, encode_runs(foreground))


def a_creature() -> Annotation:
    kind = list_species(8)[5]
    return build_annotation(
        draw_creature(kind, np.random.default_rng(3), (160, 224)), f"test/{kind.name}/0003.png", kind.name
    )


def test_boxes_are_counted_by_what_they_cover() -> None:
    on_beak, on_tail, on_body, off = (20, 20, 40, 40), (40, 40, 60, 60), (40, 20, 60, 40), (0, 0, 20, 20)
    hits = count_box_hits(made_up(), [on_beak, on_tail, on_body, off, on_beak], (4, 4))
    assert (hits.boxes, hits.distinguishing, hits.any_part) == (5, 2, 3)
    assert hits.most_covered == ("beak", "tail", "none", "none", "beak")


@pytest.mark.parametrize(
    ("box", "covered"),
    [
        ((22, 22, 30, 30), True),  # exactly a quarter
        ((22, 22, 29.9, 30), False),
        ((0, 0, 80, 80), True),
        ((38, 22, 60, 38), False),  # side by side
    ],
)
def test_a_quarter_of_the_part_is_enough(box: tuple[float, ...], covered: bool) -> None:
    assert count_box_hits(made_up(), [box], (4, 4)).distinguishing == covered


def test_control_of_a_made_up_creature() -> None:
    hits = count_box_hits(made_up(), [], (4, 4))
    assert hits.control_distinguishing == 1 / 4
    assert hits.control_any == 2 / 4
    assert hits.boxes == 0


@pytest.mark.parametrize("grid", [(7, 7), (5, 7), (4, 4), (6, 5)])
def test_control_is_the_mean_over_single_cells(grid: tuple[int, int]) -> None:
    """Brute force: ask for every foreground cell by itself, with foreground counted on a mask of finer pixels."""
    annotation = a_creature()
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


def test_some_cell_covers_each_distinguishing_part() -> None:
    grid = [(c * 32.0, r * 32.0, c * 32.0 + 32, r * 32.0 + 32) for r in range(7) for c in range(7)]
    for seed in range(60):
        kind = list_species(8)[seed % 8]
        annotation = build_annotation(draw_creature(kind, np.random.default_rng(seed), (224, 224)), "x.png", kind.name)
        for name in kind.distinguishing:
            only = replace(annotation, parts={name: annotation.parts[name]})
            assert count_box_hits(only, grid, (7, 7)).distinguishing >= 1


def test_cell_foreground_is_exact_where_cells_cut_pixels() -> None:
    mask = np.zeros((3, 3), dtype=bool)
    mask[1, 1] = True
    annotation = Annotation("x.png", "x", 3, 3, {}, encode_runs(mask))
    np.testing.assert_allclose(cell_foreground(annotation, (2, 2)), np.full((2, 2), 0.25 / 2.25))


def test_control_takes_the_fullest_cells_if_none_is_full_enough() -> None:
    mask = np.zeros((80, 80), dtype=bool)
    mask[25:30, 25:30] = True
    annotation = replace(made_up(), runs=encode_runs(mask))
    assert count_box_hits(annotation, [], (4, 4)).control_distinguishing == 1


def test_hidden_part_cannot_be_covered() -> None:
    annotation = made_up()
    beak = replace(annotation.parts["beak"], visible=False)
    hits = count_box_hits(replace(annotation, parts={**annotation.parts, "beak": beak}), [(20, 20, 40, 40)], (4, 4))
    assert (hits.distinguishing, hits.any_part, hits.control_distinguishing) == (0, 0, 0)


def test_summary_weighs_images_by_their_boxes() -> None:
    on_beak, off = (20, 20, 40, 40), (0, 0, 20, 20)
    first = count_box_hits(made_up(), [on_beak, on_beak, off], (4, 4))
    second = replace(count_box_hits(made_up(), [off], (4, 4)), control_distinguishing=0.75)
    summary = summarize_hits([first, second, count_box_hits(made_up(), [], (4, 4))])
    assert (summary.images, summary.boxes) == (3, 4)
    assert (summary.distinguishing, summary.any_part) == (0.5, 0.5)
    assert summary.control_distinguishing == (3 * 0.25 + 0.75) / 4
    assert summary.slots == {"x": [{"beak": 0.5, "none": 0.5}, {"beak": 1.0}, {"none": 1.0}]}


def test_no_boxes_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="no boxes"):
        summarize_hits([])


@pytest.mark.parametrize("boxes", [[[1, 2, 3]], [1, 2, 3, 4], [[[1, 2, 3, 4]]]])
def test_boxes_of_another_shape_are_refused(boxes: list[object]) -> None:
    with pytest.raises(UsageError, match=r"expected \[B, 4\]"):
        count_box_hits(made_up(), boxes, (4, 4))


def test_empty_grid_is_refused() -> None:
    with pytest.raises(UsageError, match="0x7 cells"):
        count_box_hits(made_up(), [], (0, 7))
