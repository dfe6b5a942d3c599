import itertools

import numpy as np
import pytest
from PIL import Image

from opal_deploy.visualization.boxes import TaggedBox, emphasize, pixel_box, place_tags
from opal_deploy.visualization.overlay import draw_overlay
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


def test_the_strongest_slots_line_is_twice_as_wide_and_a_weak_slots_is_faint(make_record):
    weak, strong, middle = line_widths(make_record(SIZE, CELLS, [0.02, 0.9, 0.45]))
    assert (weak, middle, strong) == (0, 1, 2)


@pytest.mark.parametrize(
    ("parts", "emphases"),
    [
        ([0.09, 0.5, 0.41], [0, 2, 1]), ([0.1, 0.9], [1, 2]), ([0.1, None], [1, 1]), ([0.0, 0.0], [1, 1]), ([0.3], [1]),
        ([0.2, float("nan")], [1, 1]), ([0.05] * 18 + [0.1, 0.0], [1] * 18 + [2, 0]),
    ],
)  # fmt: skip
def test_a_slot_that_adds_less_than_a_tenth_or_half_an_equal_part_is_faint(parts, emphases):
    assert emphasize(parts) == emphases


@pytest.mark.parametrize("side", [3, 14, 60])
@pytest.mark.parametrize("corner", [(0, 0), (200, 150), (500, 375)], ids=str)
def test_a_tag_is_no_taller_than_its_box_or_stands_apart_tied_to_it(side, corner):
    size = (500, 375)
    left, top = (min(value, limit - 3 * side) for value, limit in zip(corner, size, strict=True))
    places = [(left + column * side, top + row * side) for row, column in ((0, 0), (0, 1), (1, 0), (2, 1), (2, 2))]
    boxes = [
        TaggedBox((x, y, x + side - 1, y + side - 1), (slot,), emphasis)
        for slot, ((x, y), emphasis) in enumerate(zip(places, (0, 2, 1, 1, 1), strict=True))
    ]
    tags = place_tags(boxes, size, 1)
    assert sorted(tag.slots[0] for tag in tags) == [0, 1, 2, 3, 4]
    for tag in tags:
        x0, y0, x1, y1 = tag.place
        own = boxes[tag.slots[0]].box
        assert x1 < own[0] or own[2] < x0 or y1 < own[1] or own[3] < y0, "no tag hides its cell"
        assert min(x0, y0, size[0] - 1 - x1, size[1] - 1 - y1) >= 0
        if tag.line is None:
            assert y1 - y0 < side
        else:
            for (x, y), end in zip(tag.line, (own, tag.place), strict=True):
                assert end[0] <= x <= end[2]
                assert end[1] <= y <= end[3]
    for a, b in itertools.combinations([tag.place for tag in tags], 2):
        assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1], "no tag lies over another"
