import io
import math

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from opal_deploy.preprocess.resize import to_display
from opal_deploy.records.build import error_record
from opal_deploy.visualization.overlay import (
    COSINE,
    DISTANCE,
    SCORE,
    build_bars,
    draw_overlay,
    encode_jpeg,
    photograph_size,
)
from opal_deploy.visualization.style import format_number, slot_color

SIZE = (500, 400)


def photograph(size):
    """Return an image of neighbours that differ, in none of the colours that are drawn with."""
    y, x = np.mgrid[: size[1], : size[0]]
    return Image.fromarray(np.stack([x % 97, y % 89, (x + y) % 83], axis=-1).astype(np.uint8))


def test_boxes_have_their_slots_colours_at_their_coordinates(make_record):
    record = make_record(SIZE)
    overlay = draw_overlay(photograph(SIZE), record)
    # cells of 100 x 80 pixels
    assert record.evidence[1].box == (300.0, 160.0, 400.0, 240.0)
    for slot, (x, y) in enumerate([(0, 40), (300, 200), (400, 360)]):
        assert overlay.getpixel((x, y)) == slot_color(slot)
        assert overlay.getpixel((x + 99, y)) == slot_color(slot)


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (13, 169)], ids=str)
def test_odd_sizes_do_not_raise(make_record, size):
    for slots in (1, 40):
        cells = [(i * 7 % 5, i * 3 % 5) for i in range(slots)]
        overlay = draw_overlay(photograph(size), make_record(size, cells))
        assert min(np.subtract(overlay.size, photograph_size(*size))) >= 0


@pytest.mark.parametrize("size", [(2_000_000, 1), (1, 2_000_000), (3000, 3000)], ids=str)
def test_no_shape_makes_a_drawing_large(make_record, size):
    image, record = Image.new("RGB", size, "#777"), make_record(size, [(i % 5, i // 2) for i in range(10)])
    overlay = draw_overlay(image, record)
    assert overlay.width * overlay.height < 6_500_000
    # the same from an image that was reduced when it was decoded, with boxes at the same places
    assert draw_overlay(to_display(image), record).tobytes() == overlay.tobytes()
    assert overlay.crop((0, 0, *photograph_size(*size))).getcolors(3) is None or min(size) == 1


def test_an_enlarged_image_keeps_every_pixel(make_record):
    image = photograph((10, 10))
    overlay = draw_overlay(image, make_record((10, 10), [(4, 4)]))
    enlarged = image.crop((0, 0, 10, 6)).resize((260, 156), Image.Resampling.NEAREST)
    assert overlay.crop((0, 0, 260, 156)).tobytes() == enlarged.tobytes()


@pytest.mark.parametrize(
    ("label", "distance"),
    [("", "l1"), ("x" * 5000, "kl"), ("Möwe\nカモメ\x00\udcff", "linf"), ("word " * 200, "tropical"), ("\u202e", "l2")],
)
def test_any_label_and_every_distance_can_be_drawn(make_record, label, distance):
    record = make_record(SIZE, labels=(label, "b"), distance=distance)
    overlay = draw_overlay(Image.new("L", SIZE), record)
    assert (overlay.size[0], overlay.mode) == (SIZE[0], "RGB")


def test_without_evidence_the_photograph_has_no_boxes(answer_without_evidence):
    image = photograph((200, 200))
    overlay = draw_overlay(image, answer_without_evidence)
    assert overlay.crop((0, 0, 200, 200)).tobytes() == image.tobytes()
    assert overlay.size[1] > 200


def test_a_record_of_another_image_or_of_an_error_is_refused(make_record):
    with pytest.raises(ValueError, match="its record says"):
        draw_overlay(photograph((30, 20)), make_record((20, 30)))
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_overlay(photograph((30, 20)), error_record("a.jpg", "truncated_image", "cut"))


def test_an_abstention_is_in_the_caption(make_record):
    sure, unsure = (draw_overlay(photograph(SIZE), make_record(SIZE, min_margin=least)).height for least in (None, 1.5))
    assert unsure > sure


def test_encoded_overlays_are_jpegs_that_keep_the_lines_colours(make_record):
    record = make_record(SIZE)
    decoded = Image.open(io.BytesIO(encode_jpeg(draw_overlay(Image.new("RGB", SIZE, "#777"), record))))
    assert decoded.format == "JPEG"
    assert np.abs(np.subtract(decoded.getpixel((300, 200)), slot_color(1))).max() < 40


@pytest.mark.parametrize(
    ("distance", "meaning"), [("l2", COSINE), ("l1", DISTANCE), ("l3", DISTANCE), ("kl", DISTANCE), ("linf", SCORE)]
)
def test_only_contributions_that_add_up_to_the_cosine_are_called_a_part_of_it(make_record, distance, meaning):
    record = make_record((100, 100), scores=[0.9, 0.3, 0.6], distance=distance)
    shown, bars = build_bars(record)
    assert shown == meaning
    if distance == "l2":
        assert sum(b.value for b in bars) == pytest.approx(record.prediction.cosine, abs=1e-6)
        _, equal = build_bars(make_record((100, 100), scores=[1.0, 1.0, 1.0]))
        assert all(b.stop - b.start == pytest.approx(1.0, abs=0.02) for b in equal), "they fill the width"


def test_negative_parts_point_left_from_a_common_zero(make_record):
    _, bars = build_bars(make_record((100, 100), scores=[1.0, 0.05, 0.05], distance="kl"))
    assert bars[0].value > 0 > bars[1].value
    assert bars[0].start == bars[1].stop == bars[2].stop
    assert all(0 <= b.start <= b.stop <= 1 for b in bars)


def test_values_that_are_no_numbers_and_records_without_evidence_have_no_bar(make_record, answer_without_evidence):
    assert build_bars(answer_without_evidence)[1] == []
    record = make_record((100, 100))
    first, second, third = record.evidence
    _, bars = build_bars(replace(record, evidence=(first, replace(second, contribution=math.nan), third)))
    assert bars[1].start == bars[1].stop
    assert format_number(bars[1].value) == "nan"
