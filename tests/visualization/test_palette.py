import itertools

import numpy as np
import pytest

from opal_deploy.visualization.palette import COLORS, contrast_ratio, slot_color, text_color

# Machado, Oliveira & Fernandes (2009), severity 1.0, on linear RGB
DEFICIENCIES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color, deficiency):
    values = np.asarray(color) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.asarray(DEFICIENCIES[deficiency]) @ linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize(("slots", "apart"), [(5, 32.0), (10, 27.0)])
def test_slots_stay_apart_for_every_reader(deficiency, slots, apart):
    colors = [lab(slot_color(i), deficiency) for i in range(slots)]
    # CIE76; about 2.3 is just noticeable
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colors, 2)) > apart


def test_every_slot_has_a_colour_and_the_eleventh_that_of_the_first():
    assert [slot_color(i) for i in range(10, 1000)] == [slot_color(i) for i in range(990)]


def test_numbers_on_the_colours_can_be_read():
    assert all(contrast_ratio(text_color(color), color) >= 4.5 for color in COLORS)
