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
from opal_deploy.errors import MissingExtra, UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import Digests, ImageInfo, build_records, error_record
from opal_deploy.records.drift import DriftCounts
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.records.observations import observe_outputs, observe_records
from opal_deploy.records.record import to_record
from opal_deploy.records.shifts import Limits
from opal_deploy.records.tables import write_table
from opal_deploy.runtime.onnx_session import OnnxSession
from tests.builders import build_checkpoint, export_onnx
from tests.cli.calls import check, one_line, read_results

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
    metadata, digests = onnx_file.read_metadata(model), Digests("0" * 64, compute_sha256(model))
    infos = [ImageInfo(f"{n}.png", Geometry.whole(96, 96), digests, image_index=n) for n in range(len(outputs[1]))]
    return list(map(to_document, build_records(infos, outputs[1], metadata)))


def write(path, records):
    path.write_bytes(b"".join(map(to_json_line, records)))
    return path


def test_records_show_the_same_observations_as_outputs(model, outputs, records):
    metadata = onnx_file.read_metadata(model)
    found = observe_records(list(map(to_record, records)), metadata.class_map.max_slots, metadata.grid)
    expected = dataclasses.asdict(observe_outputs(outputs[1], metadata))
    for name, values in dataclasses.asdict(found).items():
        assert np.allclose(values, expected[name], equal_nan=True, rtol=1e-6), name


def test_images_of_the_same_kind_show_no_shift(model, records, tmp_path):
    report = find_drift(write(tmp_path / "results.jsonl", records), baseline=model)
    assert (report.images, report.baseline_images, report.shifts) == (NUMBER // 2, NUMBER // 2, [])
    assert 0.1 < report.smallest_shift < 0.3
    assert {test.kind for test in report.tests} >= {"label", "cosine", "margin", "norm", "score", "place"}


def _answers(records, class_id):
    return [record for record in records if record["prediction"]["class_id"] == class_id]


def _common(records):
    return int(np.bincount([record["prediction"]["class_id"] for record in records]).argmax())


def _move(records):
    for record in _answers(records, _common(records)):
        record["evidence"][1]["cell"] = [2, 2]


def _lose(records):
    records[:] = [record for record in records if record not in _answers(records, _common(records))]


def _fade(records):
    for record in records:
        record["prediction"]["cosine"] *= 0.9


def _weaken(records):
    for record in _answers(records, _common(records)):
        record["evidence"][2]["score"] *= 0.5


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (_move, "place", f"slot 1 of NAME moved to the {PLACES[8]}: 100% of COUNT answers"),
        (_lose, "label", "NAME is predicted less often: 0% of OTHERS answers"),
        (_fade, "cosine", "cosine fell: "),
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


def test_an_earlier_run_is_a_baseline_too_whatever_the_format(model, records, tmp_path):
    before = write(tmp_path / "before.jsonl", [*records[:200], FAILED])
    _move(changed := copy.deepcopy(records[100:]))
    after = write(tmp_path / "results.jsonl", changed)
    for kind in ("parquet", "csv"):
        write_table(map(to_record, changed), tmp_path, kind)
    reports = [
        find_drift(tmp_path / name, against=before) for name in ("results.jsonl", "results.parquet", "results.csv")
    ]
    assert reports[0].shifts[0].kind == "place"
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].shifts == find_drift(after, against=before, baseline=model).shifts
    # records in memory, as documents or typed
    for given in (changed, list(map(to_record, changed))):
        assert find_drift(given, against=before, baseline=model).shifts == reports[0].shifts
    with pytest.raises(UsageError, match="the records: no model given"):
        find_drift(changed)
    with pytest.raises(UsageError, match="expected records of"):
        find_drift([{"image": "x"}] * 99, baseline=model)


def test_pooled_slots_name_the_one_that_changed_most(model, outputs):
    metadata = onnx_file.read_metadata(model)
    first = observe_outputs(outputs[0], metadata)
    few = np.concatenate([np.flatnonzero(first.class_ids == class_id)[:4] for class_id in range(metadata.num_classes)])
    baseline = Baseline.measure(first.select(few), "val", metadata.stride, metadata.class_map)
    counts = DriftCounts(baseline, metadata.class_map)
    now = observe_outputs(outputs[1], metadata)
    class_id = int(np.bincount(now.class_ids).argmax())
    scores = np.where((now.class_ids == class_id)[:, None], now.scores + np.array([0, 0, 9]), now.scores)
    counts.add(dataclasses.replace(now, scores=scores))
    score = next(test for test in counts.compare() if test.kind == "score")
    assert score.pooled
    assert score.slot == 2
    assert "slots of rarely predicted classes, most of all slot 2 of" in score.describe(metadata.class_names)


def test_among_samples_of_one_distribution_false_alarms_stay_below_the_rate(model, outputs):
    metadata = onnx_file.read_metadata(model)
    everything = observe_outputs(Outputs.concatenate(outputs), metadata)
    random, alarms, runs = np.random.default_rng(0), 0, 60
    for _ in range(runs):
        order = random.permutation(len(everything))
        baseline = Baseline.measure(everything.select(order[:150]), "val", metadata.stride, metadata.class_map)
        counts = DriftCounts(Baseline.from_dict(baseline.to_dict()), metadata.class_map)
        counts.add(everything.select(order[150:]))
        alarms += bool(Limits(0.05, 0.0).select(counts.compare()))
    assert alarms / runs <= 0.1


def test_the_command_prints_few_lines_and_a_nightly_job_gets_an_exit_code(opal, model, records, tmp_path):
    path = write(tmp_path / "results.jsonl", records)
    # the model is found below runs/, where `infer` finds it too
    (tmp_path / "runs/x").mkdir(parents=True)
    shutil.copy(model, tmp_path / "runs/x")
    (tmp_path / "run.json").write_text(
        json.dumps({"run": {"model": {"file": "model.onnx", "sha256": compute_sha256(model)}}})
    )
    assert opal("drift", tmp_path, "--fail-on", "any", cwd=tmp_path).returncode == 0
    _move(changed := copy.deepcopy(records))
    write(path, changed)
    assert "Exit code 0; for scripts, --fail-on any" in check(opal("drift", path, cwd=tmp_path)).stderr
    done = opal("drift", path, "--json", "--fail-on", "evidence", cwd=tmp_path)
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
        (lambda r, _: r[:19], "images with an answer: 19; expected at least 20"),
        (lambda r, _: [], "images with an answer: 0;"),
        (lambda r, _: [FAILED] * 30, "images with an answer: 0;"),
        (lambda r, _: _set(r, model_sha256="a" * 64), "records of another model (sha256 aaaaaaaaaaaa..., expected "),
        (
            lambda r, _: [*r, *_set(r, model_sha256="b" * 64)],
            "records of two models (sha256 bbbbbbbbbbbb..., expected ",
        ),
        (lambda r, _: [{k: v for k, v in one.items() if k != "evidence"} for one in r], "its records have no evidence"),
        (lambda r, _: _set(r, evidence=[{**r[0]["evidence"][0], "slot": 3}]), "a slot that is not one of 3"),
        (
            lambda r, _: _set(r, prediction={**r[0]["prediction"], "class_id": 10**9}),
            "its records have a class 1000000000, where at most",
        ),
    ],
)
def test_results_that_cannot_be_compared_are_one_line(opal, model, records, tmp_path, make, message):
    path = write(tmp_path / "results.jsonl", make(records, model))
    assert message in one_line(opal("drift", path, "--baseline", model))


def test_a_model_without_a_fitting_baseline_is_one_line(opal, model, plain_model, outputs, records, tmp_path):
    metadata = onnx_file.read_metadata(model)
    path = write(tmp_path / "results.jsonl", _set(records, model_sha256=None))
    other = tmp_path / "other.onnx"
    shutil.copy(plain_model, other)
    assert "it has no baseline; measure it with" in one_line(opal("drift", path, "--baseline", other))
    add_baseline(other, outputs[0], stride=8)
    assert "its baseline is of stride 8 and 4 classes" in one_line(opal("drift", path, "--baseline", other))
    add_baseline(other, outputs[0], images="many")
    assert "baseline.images 'many'" in one_line(opal("drift", path, "--baseline", other))
    assert "give --baseline MODEL, or --against" in one_line(opal("drift", path))
    assert "opal-deploy[drift]" in one_line(opal("drift", path, blocked=("scipy",)))
    cropped = copy.deepcopy(records)
    for record in cropped:
        for slot in record["evidence"]:
            slot["box"] = [side / 2 + 7 for side in slot["box"]]
    assert "also give --baseline MODEL" in one_line(opal("drift", write(path, cropped), "--against", path))
    # a run says how to read its records
    layout = {"slots": 3, "grid": list(metadata.grid), "classes": metadata.num_classes, "dropped": []}
    (tmp_path / "run.json").write_text(json.dumps({"run": {}, "layout": layout}))
    _move(moved := copy.deepcopy(cropped))
    shifts = find_drift(write(tmp_path / "moved.jsonl", moved), against=path).shifts
    assert shifts == find_drift(tmp_path / "moved.jsonl", against=path, baseline=model).shifts != []
    (tmp_path / "run.json").write_text(json.dumps({"run": {}, "layout": {**layout, "slots": "many"}}))
    assert "also give --baseline MODEL" in one_line(opal("drift", path, "--against", path))
    table = tmp_path / "results.csv"
    table.write_text("a,b\n1,2\n")
    assert "not a table of `infer --format`" in one_line(opal("drift", table, "--baseline", model))
    with pytest.raises(UsageError, match="max_q"):
        find_drift(path, max_q=2)
    assert OnnxSession(other, device="cpu", threads=1).metadata.baseline


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
    done = opal("drift", tmp_path / "now", "--against", tmp_path / "before", "--html", page, "--root", "/")
    assert done.stderr.splitlines()[-1] == f"Page: {page}"
    text = page.read_text("utf-8")
    assert "<h3>Before</h3>" in text
    assert "<h3>Now</h3>" in text
    assert text.count("data:image/jpeg;base64,") >= 8
    assert "moved to the upper right corner" in text
    assert "a<b>" not in text
    # photographs that are gone are left out
    shutil.rmtree(folder)
    opal("drift", tmp_path / "now", "--against", tmp_path / "before", "--html", page, "--overwrite")
    assert "data:image" not in page.read_text("utf-8")


def test_without_scipy_the_extra_is_named(model, records, tmp_path, monkeypatch):
    monkeypatch.setattr("opal_deploy.errors.is_installed", lambda package: package != "scipy")
    with pytest.raises(MissingExtra, match="drift"):
        find_drift(write(tmp_path / "results.jsonl", records), baseline=model)
