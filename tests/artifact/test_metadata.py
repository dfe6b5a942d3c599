"""The metadata document: it is read back equal, and what is no such document is refused in one line."""

import json
import reprlib
from dataclasses import replace

import pytest

from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata
from opal_deploy.errors import ArtifactError

METADATA = Metadata(
    class_names=("Sooty Albatross", "Äuklet \u2603", 'quoted "x"\n', "lone \udcff surrogate"),
    prototypes_per_class=5,
    head={"distance": "l2", "epsilon": 1e-8, "cws": True},
    evidence="exact",
    backbone="resnet18",
    grid=(7, 14),
    input_size=(224, 448),
    crop="boxes",
    source={"file": "a.pt", "sha256": "ab", "assumed": {"distance": "l2"}},
    training={"metrics": {"test_accuracy": 0.1 + 0.2}},
)


RISK = {"images": 3, "error": 0.3, "aurc": 0.2, "coverage_at_error": {"0.01": 0.0}, "levels": [[0.1, 3, 1]]}
EVALUATION = {**dict.fromkeys(("when", "opal_deploy", "model", "data", "split"), "x"), "images": 60, "accuracy": 1.0}


def _document(**change):
    return {**json.loads(METADATA.to_json()), **change}


def test_it_is_one_line_of_ascii_that_is_read_back_equal():
    text = METADATA.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert Metadata.from_json(text) == METADATA
    best = replace(METADATA, outputs=TOP_OUTPUTS, top_k=3)
    assert Metadata.from_json(best.to_json()) == best
    calibration = {"method": "temperature", "images": 60, "temperature": 0.125, "ece": 0.02}
    calibrated = Metadata.from_json(replace(METADATA, calibration=calibration).to_json())
    assert (calibrated.temperature, METADATA.temperature) == (0.125, None)
    assert (METADATA.num_classes, METADATA.num_prototypes) == (4, 20)
    assert (METADATA.distance, METADATA.epsilon) == ("l2", 1e-8)


ADDED_LATER = {
    "risk", "calibration", "edits", "evaluation", "receptive_field", "baseline", "keep_layers", "top_k",
    "class_weights", "patches",
}  # fmt: skip


def test_a_key_that_was_added_after_schema_1_began_may_be_missing():
    old = {key: value for key, value in _document().items() if key not in ADDED_LATER}
    read = Metadata.from_json(json.dumps(old))
    assert read == METADATA
    assert (read.known_baseline, read.temperature, read.effective_field) == (None, None, None)


def test_a_key_of_a_later_version_is_kept_where_the_document_is_written_again():
    risk = {**RISK, "split": "val", "error": 1}
    later = _document(invented_later=[1], unknown={"a": 2}, risk=risk)
    read = Metadata.from_json(json.dumps(later))
    # as texts: a whole number stays one
    again = json.loads(replace(read, edits=()).to_json())
    assert json.dumps(again, sort_keys=True) == json.dumps(later, sort_keys=True)


@pytest.mark.parametrize("keys", [["crop"], list(_document().keys() - {"schema"} - ADDED_LATER)], ids=len)
def test_keys_that_are_missing_are_named_at_once(keys):
    document = {key: value for key, value in _document().items() if key not in keys}
    with pytest.raises(ArtifactError, match=f"lacks {', '.join(sorted(keys))}"):
        Metadata.from_json(json.dumps(document), "m.onnx")


@pytest.mark.parametrize("text", ["", "{", "[1]", pytest.param("[" * 100_000, id="deeply nested")])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(ArtifactError, match=r"m\.onnx"):
        Metadata.from_json(text, "m.onnx")


@pytest.mark.parametrize(
    "change",
    [
        {"evidence": "some"}, {"grid": [7]}, {"grid": [0, 7]}, {"grid": ["7", 7]}, {"grid": [True, True]},
        {"input_size": [224.0, 224]}, {"mean": [0.5]}, {"class_names": []}, {"class_names": [1, 2]}, {"outputs": {}},
        {"prototypes_per_class": 0}, {"prototypes_per_class": 10**30}, {"head": []}, {"head": {"distance": "l2"}},
        {"head": {"distance": 1.5, "epsilon": 1e-8}}, {"head": {"distance": "l2", "epsilon": "x"}},
        {"grid": [1000, 7]}, {"test_vectors": []}, {"risk": {"aurc": 0.1}}, {"verification": None},
        {"file_sha256": 3}, {"calibration": {"temperature": 0}}, {"keep_layers": 1}, {"outputs": ["scores"]},
        {"outputs": TOP_OUTPUTS}, {"outputs": TOP_OUTPUTS[:3], "top_k": 2}, {"top_k": 2},
        {"outputs": TOP_OUTPUTS, "top_k": 5}, {"schema": None}, {"schema": 2}, {"schema": "1"},
        {"resize": "half a pair: \ud800"}, {"exporter": {"opset": float("inf")}},
        {"exporter": json.loads("[" * 40 + "]" * 40)}, {"verification": {"gate": {"tie": "x"}}},
        {"training": {"metrics": {"loss": float("nan")}}}, {"training": {"weights": {"pretrained_cfg": {"tag": "a1"}}}},
        {"risk": {**RISK, "levels": []}}, {"risk": {**RISK, "levels": [[0.1, 3, 4]]}}, {"risk": {**RISK, "images": 4}},
        {"risk": {**RISK, "error": 10**400}}, {"edits": [{"dropped": ["a/1"]}]}, {"calibration": {"images": 3}},
        {"receptive_field": {"stride": 0}}, {"evaluation": {**EVALUATION, "images": -1}},
        {"evaluation": {**EVALUATION, "pointing_game": {"part": {"mean": 0.5}}}},
    ],
    ids=lambda change: reprlib.repr(change).encode("ascii", "replace").decode(),
)  # fmt: skip
def test_a_value_of_the_wrong_shape_is_refused_in_one_line(change):
    with pytest.raises(ArtifactError) as error:
        Metadata.from_json(json.dumps(_document(**change)), "m.onnx")
    assert str(error.value).startswith("m.onnx: ")
    assert any(name in str(error.value) for name in change)
    assert "\n" not in str(error.value)
