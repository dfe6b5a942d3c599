import itertools

import numpy as np
import pytest

from opal_deploy.visualization.style import (
    COLORS,
    contrast_ratio,
    escape_unprintable,
    measure_text,
    slot_color,
    text_color,
    to_drawable,
    wrap_text,
)

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


def test_numbers_on_the_colours_can_be_read():
    assert all(contrast_ratio(text_color(color), color) >= 4.5 for color in COLORS)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name.jpg", "plain name.jpg"),
        ("Größe 中", "Größe 中"),
        ("a\nb", "a\\nb"),
        ("a\udcffb", "a\\udcffb"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),  # right-to-left override
        ("می\u200cخواهم", "می\u200cخواهم"),  # its joiner is spelling
    ],
)
def test_what_does_not_print_is_made_visible(text, shown):
    assert escape_unprintable(text) == shown


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("Black  footed\nAlbatross\t", "Black footed Albatross"),
        ("Élan Łódź Straße", "Elan Lodz Strasse"),
        ("e\u0301", "e"),
        ("カモメ 2", "??? 2"),
        ("a\x00\udcffb", "a??b"),
        ("", ""),
    ],
)
def test_labels_are_reduced_to_what_the_font_has(text, drawn):
    assert to_drawable(text) == drawn


def test_text_is_broken_at_spaces_and_ends_in_an_ellipsis():
    assert wrap_text("short", 14, 200) == ["short"]
    lines = wrap_text("Northern long-tailed nightjar, female, winter plumage", 14, 120, lines=2)
    assert len(lines) == 2
    assert lines[0] == "Northern"
    assert lines[1].endswith("…")
    assert all(measure_text(line, 14) <= 120 for line in lines)


def test_a_width_of_nothing_and_a_million_letters_still_end():
    assert len(wrap_text("word", 14, 0, lines=3)) <= 3
    assert len(to_drawable("x" * 1_000_000)) == 300
