from itertools import combinations

import numpy as np
import pytest

from opal_deploy.synthetic.creatures import MAX_SPECIES, VARIANTS, draw_creature, list_species

SIDE = 224
KINDS = list_species(MAX_SPECIES)


def drawn(kind, seed, size=(SIDE, SIDE)):
    return draw_creature(KINDS[kind], np.random.default_rng(seed), size)


def within(boxes, size):
    """bool [H, W]: pixels that lie in one of the boxes, at least in part."""
    y, x = np.mgrid[: size[0], : size[1]]
    inside = np.zeros(size, dtype=bool)
    for x0, y0, x1, y1 in boxes:
        inside |= (x + 1 > x0) & (x < x1) & (y + 1 > y0) & (y < y1)
    return inside


def test_two_species_differ_exactly_inside_the_parts_that_differ():
    size = (128, 96)
    for seed, (a, b) in enumerate(combinations(range(MAX_SPECIES), 2)):
        one, two = drawn(a, seed, size), drawn(b, seed, size)
        changed = (one.image != two.image).any(axis=2)
        differing = [part for part in VARIANTS if one.parts[part].variant != two.parts[part].variant]
        assert 2 <= len(differing) <= 4
        assert not (changed & ~within([c.parts[p].box for c in (one, two) for p in differing], size)).any()
        for part in differing:
            assert changed[within([one.parts[part].box, two.parts[part].box], size)].mean() > 0.05, part
        for part in VARIANTS.keys() - set(differing):
            assert one.parts[part].box == two.parts[part].box


@pytest.mark.parametrize("part", VARIANTS)
def test_box_is_tight_around_what_the_part_paints(part):
    for seed, kind in enumerate(KINDS):
        whole = drawn(seed, seed)
        without = draw_creature(kind, np.random.default_rng(seed), (SIDE, SIDE), hide=[part])
        rows, columns = np.nonzero((whole.image != without.image).any(axis=2))
        x0, y0, x1, y1 = whole.parts[part].box
        # where a part meets the creature its root lies under the head or the body
        hidden = 0.0 if part == "wing" else 0.05 * SIDE
        painted = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        slack = (painted - [x0, y0, x1, y1]) * [1, 1, -1, -1]
        assert slack.min() > -1
        assert slack.max() < hidden + 2.5, (kind.name, slack)


@pytest.mark.parametrize("count", [4, MAX_SPECIES])
def test_exactly_the_special_parts_distinguish(count):
    for one in list_species(count):
        special = {part for part in VARIANTS if one.variants[part] != VARIANTS[part][0]}
        assert len(special) == 2
        assert one.distinguishing == special
