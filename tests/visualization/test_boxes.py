import itertools

import numpy as np
import pytest
from PIL import Image

from opal_deploy.visualization.boxes import TaggedBox, compute_shares, pixel_box, place_tags
from opal_deploy.visualization.overlay import BOX_NOTE, draw_overlay
from opal_deploy.visualization.style import slot_color

SIZE = (500, 400)
CELLS = ((0, 0), (2, 3), (4, 4))


def line_widths(record):
    """Return how many pixels of its colour the left edge of each slot's box has."""
    pixels = np.asarray(draw_overlay(Image.new("RGB", SIZE, "#777"), record))
    widths = []
    for slot in record.evidence:
        x0, y0, x1, y1 = pixel_box(slot.box, (1, 1), SIZE)
        row = pixels[(y0 + y1) // 2, x0 : (x0 + x1) // 2]
        widths.append(int((row == slot_color(slot.slot)).all(axis=1).sum()))
    return widths


def test_a_boxs_line_is_as_wide_as_its_slots_contribution_says(make_record):
    weak, strong, middle = line_widths(make_record(SIZE, CELLS, [0.02, 0.9, 0.45]))
    assert 1 <= weak < middle < strong
    assert strong == 5 * weak


@pytest.mark.parametrize("distance", ["linf", "kl", "l1"])
def test_where_contributions_do_not_add_up_to_the_cosine_all_lines_are_equal(make_record, distance):
    assert len(set(line_widths(make_record(SIZE, CELLS, [0.02, 0.9, 0.45], distance=distance)))) == 1


def test_the_legend_says_what_the_line_means_only_where_it_means_something(make_record, monkeypatch):
    notes = []
    monkeypatch.setattr("opal_deploy.visualization.overlay.wrap_text", lambda text, *_, **__: notes.append(text) or [])
    for record in (make_record(SIZE), make_record(SIZE, distance="kl"), make_record(SIZE, [(2, 2)])):
        draw_overlay(Image.new("RGB", SIZE), record)
    assert notes.count(BOX_NOTE) == 1


@pytest.mark.parametrize(
    ("values", "shares"),
    [([0.1, 0.2], [0.5, 1.0]), ([0.1, None], [None] * 2), ([0.0, 0.0], [None] * 2), ([0.2, float("nan")], [None] * 2)],
)
def test_shares_are_of_the_largest_contribution_and_of_nothing_else(values, shares):
    assert compute_shares(values) == shares


@pytest.mark.parametrize("side", [3, 6, 10, 14, 20, 60])
@pytest.mark.parametrize("corner", [(0, 0), (200, 150), (500, 375)], ids=str)
def test_a_tag_is_no_larger_than_its_box_or_stands_apart_tied_to_it(side, corner):
    size = (500, 375)
    left, top = (min(value, limit - 3 * side) for value, limit in zip(corner, size, strict=True))
    places = [(left + column * side, top + row * side) for row, column in ((0, 0), (0, 1), (1, 0), (2, 1), (2, 2))]
    boxes = [
        TaggedBox((x, y, x + side - 1, y + side - 1), (slot,), share)
        for slot, ((x, y), share) in enumerate(zip(places, (0.1, 1.0, 0.6, 0.3, 0.9), strict=True))
    ]
    tags = place_tags(boxes, size, 1)
    assert sorted(tag.slots[0] for tag in tags) == [0, 1, 2, 3, 4]
    for tag in tags:
        x0, y0, x1, y1 = tag.place
        assert min(x0, y0, size[0] - 1 - x1, size[1] - 1 - y1) >= 0
        if tag.line is None:
            assert max(x1 - x0, y1 - y0) < side
        else:
            box = boxes[tag.slots[0]].box
            for (x, y), end in zip(tag.line, (box, tag.place), strict=True):
                assert end[0] <= x <= end[2]
                assert end[1] <= y <= end[3]
    for a, b in itertools.combinations([tag.place for tag in tags], 2):
        assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1], "no tag lies over another"
