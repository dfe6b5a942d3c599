import pytest

from opal_deploy.visualization.style import (
    COLORS,
    escape_unprintable,
    luminance,
    measure_text,
    text_color,
    to_drawable,
    wrap_text,
)


def test_numbers_on_the_colours_can_be_read():
    for color in COLORS:
        low, high = sorted((luminance(text_color(color)), luminance(color)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


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
