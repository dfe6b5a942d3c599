import pytest
from PIL import Image, ImageDraw

from opal_deploy.visualization.text import (
    draw_text,
    escape_unprintable,
    font,
    measure_text,
    text_length,
    to_drawable,
    truncate_middle,
    wrap_lines,
    wrap_text,
)


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
    face = font(14)
    assert wrap_text("short", face, 200) == ["short"]
    lines = wrap_text("Northern long-tailed nightjar, female, winter plumage", face, 120, lines=2)
    assert len(lines) == 2
    assert lines[0] == "Northern"
    assert lines[1].endswith("…")
    assert all(face.getlength(line) <= 120 for line in lines)


def test_a_width_of_nothing_and_a_million_letters_still_end():
    assert len(wrap_text("word", font(14), 0, lines=3)) <= 3
    assert len(to_drawable("x" * 1_000_000)) == 300


@pytest.mark.parametrize(
    "text",
    ["class 3   cosine 0.853   margin -0.120", "Black-footed Albatross", "AVATAR To Wa.", "0.174", "  a  ", "", "é?"],
)
@pytest.mark.parametrize("size", [11, 12, 15, 19, 33])
def test_words_that_are_kept_are_drawn_and_measured_as_the_font_draws_them(text, size):
    face = font(size)
    assert text_length(text, face) == face.getlength(text)
    for anchor in ("la", "lm", "rm", "mm"):
        for x, y in ((40, 30), (400.5, 30.5), (200.25, 30)):
            expected, found = (Image.new("RGB", (900, 80), (250, 250, 248)) for _ in range(2))
            ImageDraw.Draw(expected).text((x, y), text, (200, 26, 90), face, anchor=anchor)
            # the second time from what was kept
            for _ in range(2):
                found.paste((250, 250, 248), (0, 0, 900, 80))
                draw_text(ImageDraw.Draw(found), (x, y), text, (200, 26, 90), face, anchor)
            assert found.tobytes() == expected.tobytes(), (anchor, x, y)


def test_long_text_is_cut_where_it_tells_least():
    assert truncate_middle("a" * 200 + "/end.jpg", 16, 300).endswith("/end.jpg")
    assert measure_text(truncate_middle("ab" * 500, 16, 300), 16) <= 300
    lines = wrap_lines("word " * 100, 16, 300, 3)
    assert len(lines) == 3
    assert lines[-1].endswith("…")
    assert all(measure_text(line, 16) <= 300 for line in lines)
