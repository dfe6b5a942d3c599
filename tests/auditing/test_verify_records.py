"""Records computed again: whatever was changed in one, in its image or in the model, is found and named."""

import copy
import hashlib
import json
from dataclasses import replace

import pytest
from msgspec import structs

import opal_deploy
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.auditing.verify_records import CheckOptions, GivenImages, sample_lines, verify_records
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.records.build import error_record
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.sources.image import InputImage


@pytest.fixture(scope="module")
def folder(make_pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    make_pictures(folder, 4)
    (folder / "broken.png").write_bytes((folder / "000.png").read_bytes()[:200])
    (folder / "a\\b <i>\n.png").write_bytes((folder / "001.png").read_bytes())
    return folder


@pytest.fixture(scope="module")
def records(exact_model, folder):
    paths = sorted(folder.iterdir())
    return json.loads(json.dumps(opal_deploy.load(exact_model, device="cpu", threads=1).predict(paths, top=3)))


@pytest.fixture(scope="module")
def answered(records):
    return next(record for record in records if record["status"] == "ok")


@pytest.fixture(scope="module")
def verify(exact_model, tmp_path_factory):
    """Verify records, with these fields of the check changed."""
    session = OnnxSession(exact_model, device="cpu", threads=1)
    check = CheckOptions(compute_sha256(exact_model), inference=InferenceOptions(batch=8))
    path = tmp_path_factory.mktemp("verify") / "results.jsonl"

    def run(records, more="", lines=None, **changes):
        path.write_text("".join(json.dumps(record) + "\n" for record in records) + more)
        return verify_records(path, session, replace(check, **changes), lines)

    return run


def leaves(value, path=()):
    """Paths to everything in a record that holds nothing else."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


def tamper(record, path):
    """The record with one value changed to another of its kind, by as little as somebody would bother to."""
    changed = copy.deepcopy(record)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    if isinstance(old, str):
        holder[path[-1]] = "abstained" if path == ("status",) else old + "x"
    elif isinstance(old, int):
        holder[path[-1]] = old + 1
    else:
        holder[path[-1]] = 0.5 if old is None else old + 0.001
    return changed


def test_a_change_of_any_field_is_found_and_named(verify, records, answered):
    failed = next(record for record in records if record["status"] == "error")
    cases = [(record, path) for record in (answered, failed) for path in leaves(record) if path[-1] != "message"]
    assert len(cases) > 50
    report = verify([tamper(record, path) for record, path in cases])
    findings = {finding.line: finding for finding in report.findings}
    for line, (_, path) in enumerate(cases, 1):
        assert line in findings, path
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
        fields = [difference.field for difference in findings[line].differences]
        if path[0] in ("schema", "status"):
            # such a line is no record at all, or one of another kind
            assert findings[line].why == "not a complete record" or fields == ["status"], path
        elif path[0] == "image":
            assert (findings[line].why, findings[line].checked) == ("image not found", False)
        elif path[0] == "top":
            # another number may mean another class, whose label and cosine are then wrong
            assert any(field.startswith(f"top[{path[1]}]") for field in fields), (path, fields)
        else:
            # a cell and a box are each one thing
            assert any(name == field or name.startswith(f"{field}[") for field in fields), (path, fields)


def test_a_missing_slot_and_somebody_elses_overlay_are_found(verify, answered):
    cases = [{**answered, "evidence": answered["evidence"][:-1]}, {**answered, "overlay": "../../etc/passwd"}]
    assert [finding.line for finding in verify(cases).findings] == [1, 2]


def test_untouched_records_are_what_the_model_computes(verify, records, answered, folder):
    report = verify(records)
    assert (report.records, report.checked, report.different, report.findings) == (6, 6, 0, [])
    other = verify(records, model_sha256="0" * 64)
    assert other.different == len(records)
    assert "another model" in str(other.findings[0])
    # images below a root
    relative = [{**record, "image": record["image"].removeprefix(f"{folder}/")} for record in records]
    assert verify(relative, root=folder).different == 0
    # without the images nothing is known, which is no difference
    missing = verify(relative)
    assert (missing.checked, missing.different, missing.not_checked) == (6, 0, 6)


def test_an_error_of_a_busy_machine_need_not_happen_again(verify, answered):
    late = {key: answered[key] for key in ("schema", "image", "model_sha256")}
    late |= {"status": "error", "image_sha256": None, "error": {"code": "decode_timeout", "message": "30 s"}}
    # HEIC is read where pi-heif is installed
    unread = {**late, "error": {"code": "unsupported_image", "message": "a HEIC image"}}
    report = verify([late, unread])
    assert (report.different, report.not_checked) == (0, 0)


@pytest.mark.parametrize(("code", "different"), [("corrupt_image", 0), ("not_an_image", 0), ("too_many_pixels", 1)])
def test_a_broken_image_may_have_had_another_message_and_code_for_it(verify, answered, tmp_path, code, different):
    data = b"\x89PNG, and no more"
    (tmp_path / "a.png").write_bytes(data)
    record = {"schema": 1, "image": str(tmp_path / "a.png"), "status": "error"}
    record |= {"image_sha256": hashlib.sha256(data).hexdigest(), "model_sha256": answered["model_sha256"]}
    report = verify([{**record, "error": {"code": code, "message": "OSError: of an earlier version"}}])
    assert report.different == different, report.findings


def test_images_of_one_name_are_told_apart_by_their_content():
    given = GivenImages([InputImage("a.png", content) for content in (b"first", b"second")])
    for content in (b"second", b"first"):
        record = error_record("a.png", "not_an_image", "")
        found = given.find(structs.replace(record, image_sha256=hashlib.sha256(content).hexdigest()))
        assert found.source == content


def test_a_sample_has_its_size_and_is_the_same_for_a_seed(tmp_path, records):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert sample_lines(path, None, 0) == sample_lines(path, 6, 0) == (6, None)
    samples = {sample_lines(path, 3, seed)[1] for seed in range(30)}
    assert {len(lines) for lines in samples} == {3}
    assert len(samples) > 5


def test_a_damaged_line_is_found_in_any_sample(verify, records):
    report = verify(records, more='{"schema": 1, "ima', lines=frozenset([1]))
    assert (report.checked, report.different, report.findings[0].line) == (1, 1, 7)
