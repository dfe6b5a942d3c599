import math

import pytest

from opal_deploy.visualization.legend import COSINE, DISTANCE, SCORE, build_bars, format_number


@pytest.mark.parametrize(
    ("distance", "meaning"),
    [("l2", COSINE), ("l1", DISTANCE), ("l3", DISTANCE), ("kl", DISTANCE), ("linf", SCORE)],
)
def test_only_contributions_that_add_up_to_the_cosine_are_called_a_part_of_it(make_record, distance, meaning):
    record = make_record((100, 100), scores=[0.9, 0.3, 0.6], distance=distance)
    bars = build_bars(record)
    assert bars.meaning == meaning
    if distance == "l2":
        assert sum(b.value for b in bars.bars) == pytest.approx(record["prediction"]["cosine"], abs=1e-6)
        equal = build_bars(make_record((100, 100), scores=[1.0, 1.0, 1.0]))
        assert all(b.stop - b.start == pytest.approx(1.0, abs=0.02) for b in equal.bars), "they fill the width"


def test_negative_parts_point_left_from_a_common_zero(make_record):
    bars = build_bars(make_record((100, 100), scores=[1.0, 0.05, 0.05], distance="kl")).bars
    assert bars[0].value > 0 > bars[1].value
    assert bars[0].start == bars[1].stop == bars[2].stop
    assert all(0 <= b.start <= b.stop <= 1 for b in bars)


def test_values_that_are_no_numbers_and_records_without_evidence_have_no_bar(make_record, answer_without_evidence):
    assert build_bars(answer_without_evidence).bars == ()
    record = make_record((100, 100))
    record["evidence"][1]["contribution"] = math.nan
    bars = build_bars(record).bars
    assert bars[1].start == bars[1].stop
    assert format_number(bars[1].value) == "nan"


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.123"), (-0.0001, "0.000"), (None, "–"), (-0.5, "-0.500")])
def test_numbers_have_three_decimals(value, text):
    assert format_number(value) == text
