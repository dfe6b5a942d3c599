from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from opal_deploy.synthetic.creatures import MAX_SPECIES, VARIANTS, list_species
from opal_deploy.synthetic.shapes import part_polygons


def test_any_two_species_differ_in_two_to_four_parts():
    for a, b in combinations(list_species(MAX_SPECIES), 2):
        assert 2 <= sum(a.variants[part] != b.variants[part] for part in VARIANTS) <= 4, (a.name, b.name)


@pytest.mark.parametrize("count", range(4, MAX_SPECIES + 1))
def test_exactly_the_special_parts_distinguish(count):
    for one in list_species(count):
        special = {part for part in VARIANTS if one.variants[part] != VARIANTS[part][0]}
        assert len(special) == 2
        assert one.distinguishing == special


@pytest.mark.parametrize("part", VARIANTS)
def test_variants_of_a_part_paint_about_the_same_area(part):
    areas = []
    for variant in VARIANTS[part]:
        canvas = Image.new("L", (600, 600))
        for outline, tone in part_polygons(part, variant):
            if (part, tone) != ("wing", "fill"):  # the wing itself is the same in every variant
                flat = (outline * 1000 + 300).ravel().tolist()
                ImageDraw.Draw(canvas).polygon(flat, fill=0 if tone == "base" else 255)
        areas.append(np.count_nonzero(np.asarray(canvas)))
    assert max(areas) < 1.3 * min(areas), dict(zip(VARIANTS[part], areas, strict=True))
