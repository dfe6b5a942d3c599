"""Counts of a run, accuracy against given labels, and the limit on errors."""

import json

import pytest

from opal_deploy.errors import StoppedEarly
from opal_deploy.records.build import error_record
from opal_deploy.records.record import Answer, Answered
from opal_deploy.run.summary import Accuracy, Summary


def answered(predicted, label=None, status="ok"):
    answer = Answer(class_id="abc".index(predicted), label=predicted, logit=-1.0, cosine=0.5)
    return Answered(
        schema=1, image="a", status=status, width=4, height=3, prediction=answer, margin=0.5, top=(answer,), label=label
    )


def failed(code="not_found", label=None):
    return error_record("a", code, "", label=label)


def summary_of(*records, labels=False):
    summary = Summary(accuracy=Accuracy(frozenset("abc")) if labels else None)
    for record in records:
        summary.count(record)
    return summary


def test_records_are_counted_by_class_and_by_error():
    summary = summary_of(
        answered("b"), answered("a"), answered("b", status="abstained"), failed("empty_file"), failed()
    )
    summary.resumed, summary.seconds = 1, 2.0
    document = json.loads(json.dumps(summary.to_dict()))
    assert document["statuses"] == {"abstained": 1, "error": 2, "ok": 2}
    assert document["errors"] == {"empty_file": 1, "not_found": 1}
    assert [(entry["label"], entry["images"]) for entry in document["classes"]] == [("b", 2), ("a", 1)]
    # the rate is of this time's records
    assert (document["images"], document["new_images"], document["images_per_second"]) == (5, 4, 2.0)
    assert document["accuracy"] is None


def test_accuracy_counts_images_whose_label_is_a_class():
    records = [
        answered("a", "a"), answered("b", "b", status="abstained"), answered("b", "a"), answered("b", "lion"),
        answered("b"), failed(label="a"), failed(label="lion"),
    ]  # fmt: skip
    accuracy = summary_of(*records, labels=True).accuracy
    counts = {"correct": 2, "wrong": 1, "failed": 1, "label_is_no_class": 2, "without_label": 1}
    counts |= {"answered": 2, "answered_correct": 1}
    assert accuracy.to_dict() == {"accuracy": 2 / 3, **counts, "rows_without_image": 0}
    assert [*accuracy.describe()] == [
        "Accuracy: 2 of 3 (66.67%)",
        "  without abstained and unknown: 1 of 2 (50.00%)",
        "  images that are not counted: 1 failed, 1 have no label, 2 have no class's label",
    ]


def test_more_errors_than_the_limit_stop_the_run():
    summary = summary_of(*[answered("a")] * 5, failed(), failed())
    for limit in (None, 2):
        summary.check_errors(limit)
    for limit in (0, 1):
        with pytest.raises(StoppedEarly, match="2 of 7"):
            summary.check_errors(limit)
