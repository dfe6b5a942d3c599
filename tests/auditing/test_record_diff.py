"""A recorded explanation against a computed one: discrete fields exactly, numbers nearly, ties by their rule."""

import copy
from dataclasses import replace

import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.record_diff import Tolerance, diff_records

TOLERANCE = Tolerance(cosine=1e-3, logit=1e-3, score=1e-3, others={"ood_score": 1e-3})


def answer(class_id, cosine):
    return {"class_id": class_id, "label": "abc"[class_id], "logit": -cosine, "cosine": cosine}


def computed(first=0, margin=0.5):
    """All three classes are listed, as `verify_records` requests."""
    rest = [c for c in range(3) if c != first]
    top = [answer(first, 0.75), answer(rest[0], 0.75 - margin), answer(rest[1], 0.125)]
    slots = [
        {"slot": s, "channel": 2 * first + s, "cell": [1, s], "score": 0.5, "contribution": 0.375,
         "box": [10.0 * s, 20.0, 10.0 * s + 10, 40.0]}
        for s in range(2)
    ]  # fmt: skip
    record = {"schema": 1, "image": "a", "status": "ok", "width": 20, "height": 80, "prediction": top[0],
              "margin": margin, "top": top, "evidence": slots}  # fmt: skip
    return copy.deepcopy(record)


def recorded(**changes):
    """A record as of `infer --top 2`."""
    record = computed()
    record["top"] = record["top"][:2]
    return {**record, **changes}


def fields(old, new=None):
    return [d.field for d in diff_records(old, computed() if new is None else new, TOLERANCE)]


def test_equal_records_have_no_difference():
    assert fields(recorded()) == []
    # fields that no model computes
    old = recorded(label="c", overlay="overlays/x.jpg")
    old["evidence"][0]["name"] = "beak"
    assert fields(old) == []


def test_a_calibrated_probability_may_differ_as_far_as_its_logits():
    def with_probability(record, value):
        # the prediction is the first of the best classes
        record["prediction"]["calibrated_probability"] = value
        return record

    tolerance = replace(TOLERANCE, temperature=0.1)
    new = with_probability(computed(), 0.9)
    # 0.001 / (2 * 0.1)
    assert diff_records(with_probability(recorded(), 0.904), new, tolerance) == []
    both = ["prediction.calibrated_probability", "top[0].calibrated_probability"]
    for value in (0.906, None, "high"):
        assert [d.field for d in diff_records(with_probability(recorded(), value), new, tolerance)] == both
    # a model without a temperature gives none
    assert fields(with_probability(recorded(), 0.9)) == both


@pytest.mark.parametrize("name", ["logit", "cosine", "score", "contribution"])
@pytest.mark.parametrize(("change", "differs"), [(0.0009, False), (-0.0012, True)])
def test_numbers_may_differ_within_the_tolerance(name, change, differs):
    old = recorded()
    if name in old["prediction"]:
        old["prediction"][name] += change
        old["top"][0], expected = old["prediction"], [f"prediction.{name}", f"top[0].{name}"]
    else:
        old["evidence"][1][name] += change
        expected = [f"evidence[1].{name}"]
    assert fields(old) == expected * differs


def test_missing_and_unknown_keys_are_differences():
    old = recorded(note="trust me", schema=True)
    del old["margin"]
    old["evidence"][0]["weight"] = 1
    old["evidence"][1]["cell"] = [0, 0]
    del old["evidence"][1]["box"]
    # a boolean is no number
    expected = {"schema", "margin", "evidence[0].weight", "evidence[1].cell", "evidence[1].box", "note"}
    assert {*fields(old)} == expected


def test_the_class_may_be_another_only_where_the_margin_is_nothing():
    close = recorded(margin=0.0004)
    close["top"] = [answer(0, 0.75), answer(1, 0.7496)]
    assert fields(close, computed(1, 0.0004)) == []
    assert "prediction.class_id" in fields(recorded(), computed(1, 0.5))
    # the recorded class's own numbers still have to be right
    close["prediction"]["cosine"] = 0.8
    assert "prediction.cosine" in fields(close, computed(1, 0.0004))


def test_the_list_of_classes_has_to_be_the_best_in_their_order():
    old = recorded()
    old["top"][1] = answer(2, 0.125)
    assert fields(old) == ["top[1].class_id"]
    old["top"] = [old["top"][0]] * 2
    assert fields(old) == ["top[1].class_id"]
    assert fields(recorded(top=[answer(1, 0.25)])) == ["top[0].class_id", "top[0]"]


def test_every_precision_has_a_tolerance_and_fp32_that_of_verify():
    def tolerance(**options):
        head = {"distance": "l2", "epsilon": 1e-8}
        return Tolerance.for_model(Metadata(("a",), 1, head, "exact", "none", (1, 1), (8, 8), **options))

    assert all(0 < tolerance(precision=precision).cosine < 0.05 for precision in ("fp32", "fp16", "bf16", "int8"))
    gate = {"cosine": 5e-5, "logit": 1e-4, "score": 5e-5, "tie": 1e-4, "cells": 1.0, "all_cells": 0.0}
    assert tolerance(verification={"gate": gate}).cosine == pytest.approx(1e-4)
