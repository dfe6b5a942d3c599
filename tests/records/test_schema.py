"""The published schema says what records are: the same keys as the types, and every record that is written fits it."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints, is_typeddict

import pytest

from opal_deploy.records import record as records
from opal_deploy.records.schema import KINDS, json_schema, schema_text

Opal = Callable[..., "subprocess.CompletedProcess[str]"]
OK: dict[str, Any] = {
    "schema": 1,
    "image": "a.jpg",
    "status": "ok",
    "file_sha256": "0" * 64,
    "model_sha256": "f" * 64,
    "width": 4,
    "height": 3,
    "prediction": {"class_id": 0, "label": "ash", "logit": -0.5, "cosine": 0.875},
    "margin": 0.5,
    "top": [{"class_id": 0, "label": "ash", "logit": -0.5, "cosine": 0.875}],
    "evidence": [
        {"slot": 0, "channel": 0, "cell": [0, 1], "score": 0.5, "contribution": 0.875, "box": [1.0, 0.0, 2.0, 1.0]}
    ],
}
FAILED: dict[str, Any] = {
    "schema": 1,
    "image": None,
    "status": "error",
    "file_sha256": None,
    "model_sha256": None,
    "error": {"code": "not_found", "message": "no such file"},
}


def validator(strict: bool = False) -> Any:
    """`strict`: a key that the schema does not name is an error too."""
    jsonschema = pytest.importorskip("jsonschema")
    document = json_schema()
    if strict:
        for part in (document, *document["$defs"].values()):
            if part.get("type") == "object":
                part["additionalProperties"] = False
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


@pytest.mark.parametrize(
    ("name", "typed"), [("answer", "Answer"), ("slot", "Slot"), ("problem", "Problem"), (None, "Record")]
)
def test_types_and_schema_have_the_same_keys(name: str | None, typed: str) -> None:
    document = json_schema()
    part = document if name is None else document["$defs"][name]
    kind = getattr(records, typed)
    assert is_typeddict(kind)
    assert part["properties"].keys() == kind.__annotations__.keys()
    # what the type calls optional is not required, and the other way round
    hints = get_type_hints(kind, include_extras=True)
    assert set(part["required"]) == {key for key, hint in hints.items() if get_origin(hint) is not NotRequired}


def test_the_cli_writes_the_document_that_the_package_holds(opal: Opal) -> None:
    assert json.loads(opal("schema", blocked=("numpy", "PIL")).stdout) == json_schema()
    assert opal("schema", "--kind", "record").stdout == schema_text()
    done = opal("schema", "--kind", "nonsense")
    assert done.returncode == 2
    assert "expected record" in done.stderr
    assert KINDS == ("record",)


@pytest.mark.parametrize("record", [OK, {**OK, "status": "abstained", "margin": None, "truth": "x"}, FAILED])
def test_good_records_fit(record: dict[str, Any]) -> None:
    validator(strict=True).validate(record)


def bad() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {f"no {key}": {k: v for k, v in OK.items() if k != key} for key in
             ("schema", "image", "status", "width", "height", "prediction", "margin", "top")}  # fmt: skip
    cases["no error"] = {k: v for k, v in FAILED.items() if k != "error"}
    cases["an error with an answer"] = {**FAILED, "prediction": OK["prediction"]}
    cases["an answer with an error"] = {**OK, "error": FAILED["error"]}
    cases["another schema"] = {**OK, "schema": 2}
    cases["another status"] = {**OK, "status": "fine"}
    cases["no digest"] = {**OK, "file_sha256": "0" * 63}
    cases["a cell of three"] = copy.deepcopy(OK)
    cases["a cell of three"]["evidence"][0]["cell"] = [0, 1, 2]
    cases["a box of text"] = copy.deepcopy(OK)
    cases["a box of text"]["evidence"][0]["box"][0] = "1"
    return cases


@pytest.mark.parametrize("case", bad().values(), ids=bad())
def test_bad_records_do_not_fit(case: dict[str, Any]) -> None:
    assert not validator().is_valid(case)


def test_records_of_every_model_and_status_fit(
    exact_model: Path, map_model: Path, linear_model: Path, make_pictures: Callable, tmp_path: Path
) -> None:
    import opal_deploy

    check = validator(strict=True)
    paths = make_pictures(tmp_path / "in", 2)
    for name in ("<script>alert('1')</script>.png", "a\\b\u202e.png", "line\nend.png"):
        paths.append(paths[0].parent / name.replace("/", "_"))
        paths[-1].write_bytes(paths[0].read_bytes())
    strange = Path(str(paths[0].parent / "byte") + "\udcff.png")
    strange.write_bytes(paths[1].read_bytes())
    (tmp_path / "empty.jpg").touch()
    paths += [strange, tmp_path / "empty.jpg", tmp_path / "none.jpg"]
    statuses = set()
    for path in (exact_model, map_model, linear_model):
        model = opal_deploy.load(path, device="cpu", threads=1)
        found = model.explain(paths)
        if path != linear_model:
            found += [model.explain(paths[0], min_margin=2.0)]
        for record in found:
            written = json.loads(json.dumps(record, allow_nan=False))
            check.validate(written)
            statuses.add(written["status"])
    assert statuses == {"ok", "abstained", "error"}


@pytest.mark.data
def test_records_of_odd_images_fit(exact_model: Path, odd_images: Path) -> None:
    import opal_deploy

    check = validator(strict=True)
    found = opal_deploy.load(exact_model, device="cpu", threads=1).explain(
        [path for path in sorted(odd_images.rglob("*")) if path.is_file()], max_pixels=4_000_000
    )
    for record in found:
        check.validate(json.loads(json.dumps(record, allow_nan=False)))
    assert {"ok", "error"} <= {record["status"] for record in found}
