"""`opal-deploy edit` on real files: what it writes, what it refuses, and what every reader makes of the result."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import opal_deploy
from opal_deploy.artifact import onnx_file
from opal_deploy.cli.edit import _describe_suggested
from opal_deploy.editing.api import EditOptions, EditResult, edit_model
from opal_deploy.editing.scores import Effect
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.api import evaluate_model
from opal_deploy.evaluation.calibration import calibrate
from opal_deploy.evaluation.metrics import summarize_risk
from opal_deploy.export.api import export_model
from opal_deploy.model import checkpoint
from opal_deploy.model.checkpoint import save
from opal_deploy.runtime.select import open_sessions, read_model_metadata
from opal_deploy.synthetic import example_images
from tests.cli.calls import check, one_line, read_results
from tests.conftest import LEFT


def test_an_edited_onnx_file_is_the_export_of_the_edited_checkpoint(files, names, tmp_path, opal):
    drops = ("--drop", f"{names[0]}/1", "--drop", f"{names[2]}/0")
    outs = [tmp_path / f"edited{suffix}" for suffix in (".onnx", ".pt")]
    for out in outs:
        # an ONNX file is edited without PyTorch
        blocked = {"blocked": ("torch", "torchvision")} if out.suffix == ".onnx" else {}
        check(opal("edit", files / f"model{out.suffix}", *drops, "--out", out, "--reason", "stamps", **blocked))
    exported = export_model(outs[1], out=tmp_path / "exported.onnx", threads=1, log=print).path
    images = example_images(6, 64, 64)
    ours, theirs, before = (
        open_sessions(path, device="cpu", threads=1)[0].run(images)
        for path in (outs[0], exported, files / "model.onnx")
    )
    np.testing.assert_allclose(ours.logits, theirs.logits, atol=2e-6)
    assert (ours.argmax == theirs.argmax).all()
    assert not ours.scores[:, [1, 6]].any()
    assert (np.delete(ours.scores, [1, 6], axis=1) == np.delete(before.scores, [1, 6], axis=1)).all()
    metadata = onnx_file.read_metadata(outs[0])
    (edit,) = metadata.edits
    assert (edit["dropped"], edit["reason"], edit["parent"]["file"]) == (
        [f"{names[0]}/1", f"{names[2]}/0"], "stamps", "model.onnx"
    )  # fmt: skip
    for out in outs:
        shown = opal("inspect", out).stdout
        assert ", 2 slots dropped" in shown
        assert f"dropped {names[0]}/1, {names[2]}/0: stamps; from model{out.suffix}" in shown


def test_the_effect_is_known_before_the_edited_model_runs(files, names, tmp_path):
    out, page = tmp_path / "edited.pt", tmp_path / "page.html"
    keywords = {"data": files / "data", "threads": 1, "device": "cpu", "log": print}
    drop = [f"{names[0]}/0", f"{names[0]}/2"]
    result = edit_model(files / "model.pt", drop=drop, suggest=True, page=page, out=out, **keywords)
    before, after = result.effect.accuracy
    for path, accuracy in ((files / "model.pt", before), (out, after)):
        measured = evaluate_model(path, files / "data", split="val", device="cpu", threads=1, log=print)
        assert measured.accuracy == pytest.approx(accuracy)
    assert result.metadata.edits[-1]["measured"]["accuracy"] == [before, after]
    text = page.read_text(encoding="utf-8")
    # both may be passed on
    assert str(files) not in text
    assert str(files).encode() not in out.read_bytes()
    assert text.count("<figcaption>") == len(result.effect.changed)


def test_edits_add_up_and_figures_of_the_parent_are_marked_or_left_out(files, names, tmp_path):
    parent, first, second, lines = tmp_path / "parent.pt", tmp_path / "first.pt", tmp_path / "second.pt", []
    labels = np.arange(200) % 3
    noise = np.random.default_rng(0).normal(size=(200, 3))
    old = calibrate((noise + np.eye(3)[labels]).astype(np.float32), labels)
    assert old.temperature is not None
    risk = summarize_risk(np.linspace(0, 1, 200), labels > 0)
    save(parent, replace(checkpoint.load(files / "model.pt"), calibration=old, metrics={"val_risk": risk}))
    edit_model(parent, drop=[(names[0], 0)], out=first, threads=1, log=lines.append)
    assert "evaluate DATA --model" in lines[-1]
    edited = edit_model(first, drop=[f"{names[1]}/2"], out=second, threads=1, log=print)
    assert [edit["dropped"] for edit in edited.metadata.edits] == [[f"{names[0]}/0"], [f"{names[1]}/2"]]
    kept = checkpoint.load(second).calibration
    assert (kept.temperature, kept.split) == (old.temperature, "val (before the edit)")
    assert not read_model_metadata(second).risk


REFUSED = [
    (["--drop", "Nobody/0", "--out", "x.pt"], "the model has no class 'Nobody'"),
    (["--drop", "{0}/3", "--out", "x.pt"], "has no slot '3'; expected 0 to 2"),
    (["--drop", "{0}/1", "--drop", "{0}/1", "--out", "x.pt"], "given twice"),
    (["--drop", "{0}/0", "--drop", "{0}/1", "--drop", "{0}/2", "--out", "x.pt"], "{0} would have no slot left"),
    (["--drop", "{0}/1"], "give --out FILE"),
    (["--drop", "{0}/1", "--out", "x.onnx"], "expected a name that ends in .pt"),
    (["--drop", "{0}/1", "--out", "model.pt", "--overwrite"], "this call reads that file"),
    (["--out", "x.pt"], "nothing to do"),
    (["--suggest"], "--suggest: needs labelled images; add --data"),
    (["--drop", "{0}/1", "--annotations", "x.json", "--no-boxes", "--out", "x.pt"], "--annotations: nothing"),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED, ids=[" ".join(arguments)[:60] for arguments, _ in REFUSED])
def test_what_cannot_be_edited_is_one_line_and_writes_nothing(files, names, tmp_path, opal, arguments, expected):
    shutil.copy(files / "model.pt", tmp_path)
    line = one_line(opal("edit", "model.pt", *(word.format(*names) for word in arguments), cwd=tmp_path))
    assert expected.format(*names) in line
    assert len(line) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_engines_and_models_without_single_cells_are_refused(files, map_model, tmp_path):
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"")
    for path, expected in ((engine, "cannot be edited"), (map_model, "single cells")):
        with pytest.raises(UsageError, match=expected):
            edit_model(path, drop=["a/0"], out=tmp_path / f"x{path.suffix}")


def test_infer_records_the_slots_that_are_left(edited_model, make_pictures, tmp_path, opal):
    images = make_pictures(tmp_path / "in", 4)
    check(opal("infer", tmp_path / "in", "--model", edited_model, "--out", tmp_path / "run", "--explain"))
    records = read_results(tmp_path / "run")
    expected = opal_deploy.load(edited_model, device="cpu", threads=1).predict(images)
    for record, other in zip(records, expected, strict=True):
        assert sorted(slot["slot"] for slot in record["evidence"]) == LEFT[record["prediction"]["label"]]
        assert [slot["box"] for slot in record["evidence"]] == [slot["box"] for slot in other["evidence"]]
        total = sum(slot["contribution"] for slot in record["evidence"])
        assert total == pytest.approx(record["prediction"]["cosine"], abs=1e-6)
    assert "4 of 4 records match" in check(opal("verify", tmp_path / "run", "--model", edited_model)).stderr


def test_figures_are_json(files, names, opal):
    done = opal("edit", files / "model.onnx", "--drop", f"{names[1]}/1", "--data", files / "data", "--json")
    document = json.loads(done.stdout)
    assert (document["model"], document["effect"]["images"]) == (None, 51)


@pytest.mark.parametrize(("gained", "is_clear"), [(3, False), (9, True)])
def test_the_command_that_drops_slots_is_next_only_where_chance_does_not_explain_the_gain(gained, is_clear):
    labels = np.zeros(50, np.int64)
    before = np.where(np.arange(50) < gained, 1, 0)
    effect = Effect(before, labels, labels)
    result = EditResult(None, None, None, None, [], ["ash/0"], ["ash/0"], effect, None)
    lines = [*_describe_suggested(Path("m.pt"), result, EditOptions(data="photos", suggest=True))]
    assert ("--drop" in lines[-1]) is is_clear
    assert ("chance explains that" in lines[0]) is not is_clear
