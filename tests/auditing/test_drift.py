"""Drift of real answers: none among images of one kind, and a shift where somebody moved something."""

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.baseline import PLACES, Baseline
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.auditing.drift import find_drift
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo, build_records, error_record
from opal_deploy.records.drift import Comparison, select_shifts
from opal_deploy.records.evidence import observe_outputs, observe_records
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.records.record import to_record
from opal_deploy.runtime.onnx_session import OnnxSession
from tests.builders import build_checkpoint, export_onnx
from tests.cli.calls import check, read_results

NUMBER = 600
FAILED = error_record("x", "not_an_image", "")


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    """A tiny network without a baseline, m = 3, that predicts several classes."""
    return export_onnx(
        build_checkpoint(head=HeadConfig(prototypes_per_class=3), size=(96, 96)),
        tmp_path_factory.mktemp("plain") / "model.onnx",
    ).path


@pytest.fixture(scope="module")
def outputs(plain_model):
    """The outputs of images of random squares, in two halves of equal kind."""
    session = OnnxSession(plain_model, device="cpu", threads=1)
    squares = np.random.default_rng(0).integers(0, 256, (NUMBER, 6, 6, 3), np.uint8)
    pixels = squares.repeat(16, axis=1).repeat(16, axis=2)
    whole = Outputs.concatenate([session.run(batch) for batch in np.array_split(pixels, NUMBER // 50)])
    return whole.rows(0, NUMBER // 2), whole.rows(NUMBER // 2, NUMBER)


@pytest.fixture(scope="module")
def model(plain_model, outputs, tmp_path_factory):
    """The network with the baseline of the first half."""
    path = tmp_path_factory.mktemp("drift") / "model.onnx"
    shutil.copy(plain_model, path)
    add_baseline(path, outputs[0])
    return path


def add_baseline(path, outputs, **changes):
    metadata = onnx_file.read_metadata(path)
    baseline = Baseline.measure(observe_outputs(outputs, metadata), "val", metadata.stride, metadata.class_map)
    raw = json.loads(json.dumps({**baseline.to_dict(), **changes}))
    onnx_file.rewrite_metadata(path, dataclasses.replace(metadata, baseline=raw))


@pytest.fixture(scope="module")
def records(model, outputs):
    """The records of the second half."""
    metadata, whole = onnx_file.read_metadata(model), Geometry.whole(96, 96)
    fields = {"image_sha256": "0" * 64, "model_sha256": compute_sha256(model)}
    infos = [ImageInfo(f"{n}.png", whole, {**fields, "image_index": n}) for n in range(len(outputs[1]))]
    return list(map(to_document, build_records(infos, outputs[1], metadata)))


def write(path, records):
    path.write_bytes(b"".join(map(to_json_line, records)))
    return path


def test_records_show_the_same_observations_as_outputs(model, outputs, records):
    metadata = onnx_file.read_metadata(model)
    observed = observe_records(list(map(to_record, records)), metadata)
    expected = dataclasses.asdict(observe_outputs(outputs[1], metadata))
    for name, values in dataclasses.asdict(observed).items():
        assert np.allclose(values, expected[name], equal_nan=True, rtol=1e-6), name


def test_images_of_the_same_kind_show_no_shift(model, records, tmp_path):
    page = tmp_path / "same.html"
    report = find_drift(write(tmp_path / "results.jsonl", [*records, FAILED]), baseline=model, html=page)
    assert (report.images, report.failed, report.baseline_images, report.shifts) == (NUMBER // 2, 1, NUMBER // 2, [])
    assert 0.1 < report.smallest_shift < 0.3
    assert {test.kind for test in report.tests} >= {"label", "cosine", "margin", "norm", "score", "place"}
    text = page.read_text("utf-8")
    assert "<h1>No shift</h1>" in text
    assert all(f"Compared: {what}</h2>" in text for what in ("predicted classes", "cosine", "margin"))


def _answers(records, class_id):
    return [record for record in records if record["prediction"]["class_id"] == class_id]


def _common(records):
    return int(np.bincount([record["prediction"]["class_id"] for record in records]).argmax())


def _move(records):
    for record in _answers(records, _common(records)):
        record["evidence"][1]["cell"] = [2, 2]


def _lose(records):
    records[:] = [record for record in records if record not in _answers(records, _common(records))]


def _weaken(records):
    for record in _answers(records, _common(records)):
        record["evidence"][2]["score"] *= 0.5


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (_move, "place", f"slot 1 of NAME moved to the {PLACES[8]}: 100% of COUNT answers"),
        (_lose, "label", "NAME is predicted less often: 0% of OTHERS answers"),
        (_weaken, "score", "slot 2 of NAME: score fell: "),
    ],
)  # fmt: skip
def test_a_change_is_found_and_named(model, records, tmp_path, change, kind, words):
    changed = copy.deepcopy(records)
    change(changed)
    class_id, metadata = _common(records), onnx_file.read_metadata(model)
    report = find_drift(write(tmp_path / "results.jsonl", changed), baseline=model)
    shift = next(shift for shift in report.shifts if shift.kind == kind)
    count = len(_answers(records, class_id))
    for placeholder, text in (
        ("NAME", metadata.class_names[class_id]), ("COUNT", str(count)), ("OTHERS", str(len(records) - count)),
    ):  # fmt: skip
        words = words.replace(placeholder, text)
    assert shift.describe(report.class_names).startswith(words)
    assert report.has("any")
    assert report.has("evidence") == any(shift.kind != "label" for shift in report.shifts)


def test_among_samples_of_one_distribution_false_alarms_stay_below_the_rate(model, outputs):
    metadata = onnx_file.read_metadata(model)
    everything = observe_outputs(Outputs.concatenate(outputs), metadata)
    random, alarms, runs = np.random.default_rng(0), 0, 60
    for _ in range(runs):
        order = random.permutation(len(everything))
        baseline = Baseline.measure(everything.select(order[:150]), "val", metadata.stride, metadata.class_map)
        now = everything.select(order[150:])
        tests = Comparison(now, Baseline.from_dict(baseline.to_dict()), metadata.class_map).list_tests()
        alarms += bool(select_shifts(tests, 0.05, 0.0))
    assert alarms / runs <= 0.1


def test_the_command_prints_few_lines_and_a_nightly_job_gets_an_exit_code(opal, model, records, tmp_path):
    path = write(tmp_path / "results.jsonl", records)
    assert opal("drift", tmp_path, "--baseline", model, "--fail-on", "any").returncode == 0
    _move(changed := copy.deepcopy(records))
    write(path, changed)
    assert "Exit code 0; for scripts, --fail-on any" in check(opal("drift", path, "--baseline", model)).stderr
    done = opal("drift", path, "--baseline", model, "--json", "--fail-on", "evidence")
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) <= 12
    document = json.loads(done.stdout)
    assert document["shifts"][0]["place"] == PLACES[8]
    assert document["shifts"][0]["text"] in done.stderr


def _set(records, **values):
    return [{**record, **values} for record in records]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: r[:19], "images with an answer: 19; expected at least 20"),
        (lambda r: [FAILED] * 30, "images with an answer: 0;"),
        (lambda r: _set(r, model_sha256="a" * 64), "another model"),
        (lambda r: [{k: v for k, v in one.items() if k != "evidence"} for one in r], "no evidence"),
        (lambda r: _set(r, evidence=[{**r[0]["evidence"][0], "slot": 3}]), "a slot or cell"),
        (lambda r: _set(r, prediction={**r[0]["prediction"], "class_id": 10**9}), "a class"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(model, records, tmp_path, make, message):
    with pytest.raises(UsageError, match=message):
        find_drift(write(tmp_path / "results.jsonl", make(records)), baseline=model)


def test_a_model_without_a_fitting_baseline_is_refused(model, plain_model, outputs, records, tmp_path):
    path = write(tmp_path / "results.jsonl", _set(records, model_sha256=None))
    other = tmp_path / "other.onnx"
    shutil.copy(plain_model, other)
    with pytest.raises(UsageError, match="no baseline"):
        find_drift(path, baseline=other)
    add_baseline(other, outputs[0], stride=8)
    with pytest.raises(ArtifactError, match="another model"):
        find_drift(path, baseline=other)
    with pytest.raises(UsageError, match="--baseline"):
        find_drift(path)
    with pytest.raises(UsageError, match="max_q"):
        find_drift(path, max_q=2)


def test_the_page_shows_bars_and_photographs_of_before_and_now(model, make_pictures, opal, tmp_path):
    folder = tmp_path / "a<b>"
    make_pictures(folder, 40)
    opal("infer", folder, "--model", model, "--workers", "1", "--out", tmp_path / "before")
    changed = read_results(tmp_path / "before")
    for record in changed:
        record["evidence"][1].update(cell=[0, 2], box=[64.0, 0.0, 96.0, 32.0])
    (tmp_path / "now").mkdir()
    write(tmp_path / "now/results.jsonl", changed)
    page = tmp_path / "drift.html"
    fixed = ("drift", tmp_path / "now", "--against", tmp_path / "before", "--baseline", model, "--html", page)
    done = opal(*fixed, "--root", "/")
    assert done.stderr.splitlines()[-1] == f"Page: {page}"
    text = page.read_text("utf-8")
    assert "<h3>Before</h3>" in text
    assert "<h3>Now</h3>" in text
    assert text.count("data:image/jpeg;base64,") >= 8
    assert "moved to the upper right corner" in text
    assert "a<b>" not in text
