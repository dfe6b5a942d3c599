"""The JSON schema follows from the declaration, and every record that is written fits it."""

import json

import pytest

import opal_deploy
from opal_deploy.records.lines import parse_json, parse_record, to_document
from opal_deploy.records.record import Answered, Failed, json_schema, to_record

ANSWER = {"class_id": 0, "label": "ash", "logit": -0.5, "cosine": 0.875, "calibrated_probability": 0.75}
SLOT = {"slot": 0, "channel": 0, "cell": [0, 1], "score": 0.5, "contribution": 0.875, "box": [1.0, 0.0, 2.0, 1.0]}
OK = {
    "schema": 1, "image": "a.jpg", "status": "ok", "image_sha256": "0" * 64, "model_sha256": "f" * 64, "width": 4,
    "height": 3, "prediction": ANSWER, "margin": 0.5, "top": [ANSWER], "evidence": [SLOT],
}  # fmt: skip
FAILED = {
    "schema": 1, "image": None, "status": "error", "image_sha256": None, "model_sha256": None,
    "error": {"code": "not_found", "message": "no such file"},
}  # fmt: skip


def validator(strict=False):
    """`strict`: a key that the schema does not name is an error too."""
    jsonschema = pytest.importorskip("jsonschema")
    document = json_schema()
    if strict:
        for part in (document, *document["$defs"].values()):
            if part.get("type") == "object":
                part["additionalProperties"] = False
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def test_the_cli_writes_the_document_of_the_package(opal):
    assert json.loads(opal("schema", blocked=("numpy", "PIL")).stdout) == json_schema()


WRONG_VALUES = [
    ("image", 5), ("image_index", -1), ("width", 0), ("margin", "0.5"), ("margin", float("nan")),
    ("margin", 10**400), ("prediction", {}), ("top", []), ("evidence", [{**SLOT, "box": None}]),
    ("evidence", [{**SLOT, "cell": [1 << 63, 0]}]), ("drawing_error", {"code": "x"}), ("status", ["ok"]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG_VALUES)
def test_a_line_with_a_wrong_value_is_not_a_record(key, value):
    assert parse_record({**OK, key: value}) is None


def test_a_record_is_read_as_it_is_written():
    for document, kind in ((OK, Answered), (FAILED, Failed)):
        record = to_record(document)
        assert isinstance(record, kind)
        assert list(to_document(record).items()) == list(document.items())


def test_a_line_with_a_key_twice_or_with_nan_is_not_json():
    line = json.dumps(OK).encode() + b"\n"
    assert parse_json(line) == OK
    assert parse_json(line.replace(b'"label": "ash"', b'"label": "oak", "label": "ash"')) is None
    assert parse_json(line.replace(b"0.875", b"NaN")) is None


BAD = {
    **{f"no {key}": {k: v for k, v in OK.items() if k != key} for key in
       ("schema", "image", "status", "width", "height", "prediction", "margin", "top")},
    "no error": {k: v for k, v in FAILED.items() if k != "error"},
    "an error with an answer": {**FAILED, "prediction": OK["prediction"]},
    "an answer with an error": {**OK, "error": FAILED["error"]},
    "another schema": {**OK, "schema": 2},
    "another status": {**OK, "status": "fine"},
    "a cell of three": {**OK, "evidence": [{**SLOT, "cell": [0, 1, 2]}]},
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_records_do_not_fit(case):
    assert not validator().is_valid(case)


def test_records_of_every_model_and_status_fit(exact_model, map_model, linear_model, make_pictures, tmp_path):
    check = validator(strict=True)
    (path,) = make_pictures(tmp_path / "in", 1)
    odd_names = ("<script>alert('1')<_script>.png", "a\\b\u202e.png", "line\nend.png", "byte\udcff.png")
    paths = [path, *(tmp_path / name for name in (*odd_names, "empty.jpg"))]
    for copied in paths[1:]:
        copied.write_bytes(path.read_bytes() if copied.suffix == ".png" else b"")
    statuses = set()
    for model_path in (exact_model, map_model, linear_model):
        model = opal_deploy.load(model_path, device="cpu", threads=1)
        found = model.predict([*paths, tmp_path / "none.jpg"])
        if model_path != linear_model:
            found += [model.predict(path, min_margin=2.0)]
        for record in found:
            written = json.loads(json.dumps(record, allow_nan=False))
            check.validate(written)
            statuses.add(written["status"])
    assert statuses == {"ok", "abstained", "error"}
