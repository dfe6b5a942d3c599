import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from opal_deploy.visualization.sentences import GLOSSARY, describe_answer

SIZE = (300, 300)
PAGE = Path(__file__).parents[2] / "docs/reference/glossary.md"


@pytest.fixture
def record(make_record):
    """Five slots, of which two make most of the cosine, at the upper left and in the middle."""
    cells = [(0, 0), (2, 2), (4, 4), (4, 0), (0, 4)]
    return make_record(SIZE, cells, [0.6, 0.5, 0.1, 0.05, 0.05], labels=("Auklet", "Ani"))


def with_margin(record, margin):
    return replace(record, margin=margin)


def test_the_first_sentence_names_the_slots_that_make_two_thirds_of_the_cosine_and_their_places(record):
    first, _ = describe_answer(record)
    assert first == "46% of the match comes from slot 0 (upper left) and 38% from slot 1 (centre)."
    named = replace(record, evidence=(replace(record.evidence[0], name="beak"), *record.evidence[1:]))
    assert "slot 0, beak (upper left)" in describe_answer(named)[0]


def test_the_second_sentence_says_how_close_the_runner_up_is_and_whether_the_answer_needs_its_strongest_slot(record):
    strongest = max(slot.contribution for slot in record.evidence)
    holds, falls, close, wrong = (
        describe_answer(with_margin(record, margin))[1] for margin in (strongest + 0.01, strongest - 0.01, 0.0999, -0.2)
    )
    assert holds.startswith("The runner-up, Ani, is 0.")
    assert holds.endswith("behind; without what slot 0 found, the answer would be the same.")
    assert falls.endswith("the answer would be Ani.")
    assert close.startswith("Close call: the runner-up, Ani, is 0.100 behind")
    assert "is 0.200 ahead" in wrong


def test_a_record_says_only_what_it_has_figures_for(record, make_record, answer_without_evidence):
    (other_distance,) = describe_answer(make_record(SIZE, distance="kl"))
    assert "found" not in other_distance
    assert describe_answer(replace(answer_without_evidence, margin=None)) == []
    lonely = replace(record, margin=None, top=record.top[:1])
    assert len(describe_answer(lonely)) == 1
    broken = replace(record, evidence=(replace(record.evidence[0], contribution=math.nan), *record.evidence[1:]))
    assert len(describe_answer(broken)) == 1


def test_the_glossary_page_has_the_words_and_sentences_of_the_tooltips():
    _, *sections = PAGE.read_text("utf-8").split("\n## ")
    parts = (section.partition("\n") for section in sections)
    assert {word.lower(): " ".join(text.split()) for word, _, text in parts} == GLOSSARY
