"""`opal-deploy edit` on real files: what it writes, what it refuses, and what every reader makes of the result."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.api.model import load
from opal_deploy.artifact import onnx_file
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.editing.api import edit_model
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.api import evaluate_model
from opal_deploy.evaluation.calibration import calibrate
from opal_deploy.evaluation.session import prepared_batches
from opal_deploy.export.api import export_model
from opal_deploy.model import checkpoint
from opal_deploy.model.checkpoint import save
from opal_deploy.runtime.select import open_sessions, read_model_metadata
from opal_deploy.synthetic import example_images


def test_an_edited_onnx_file_is_the_export_of_the_edited_checkpoint(files, names, tmp_path, opal):
    drops = tmp_path / "drops.toml"
    drops.write_text(f'drop = ["{names[0]}/1", "{names[2]}/0"]\n', encoding="utf-8")
    outs = [tmp_path / f"edited{suffix}" for suffix in (".onnx", ".pt")]
    for out in outs:
        # an ONNX file is edited without PyTorch
        blocked = {"blocked": ("torch", "torchvision")} if out.suffix == ".onnx" else {}
        done = opal(
            "edit", files / f"model{out.suffix}", "--drops", drops, "--out", out, "--reason", "stamps", **blocked
        )
        assert done.returncode == 0, done.stderr
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
        shown = opal("inspect", out).stderr
        assert ", 2 slots dropped" in shown
        assert f"dropped {names[0]}/1, {names[2]}/0: stamps; from model{out.suffix}" in shown


def test_records_of_an_edited_model_show_the_slots_that_are_left(files, names, tmp_path):
    out = tmp_path / "edited.onnx"
    edit_model(files / "model.onnx", drop=[f"{name}/1" for name in names], out=out, threads=1, log=print)
    image = next((files / "data" / "val").glob("*/*.png"))
    (record,) = load(out, device="cpu").predict([image])
    assert [slot["slot"] for slot in record["evidence"]] == [0, 2]
    contributions = [slot["contribution"] for slot in record["evidence"]]
    assert sum(contributions) == pytest.approx(record["prediction"]["cosine"], abs=1e-12)


def test_the_effect_is_known_before_the_edited_model_runs(files, names, tmp_path):
    out, page = tmp_path / "edited.pt", tmp_path / "page.html"
    keywords = {"data": files / "data", "threads": 1, "device": "cpu", "log": print}
    drop = [f"{names[0]}/0", f"{names[0]}/2"]
    result = edit_model(files / "model.pt", drop=drop, suggest=True, page=page, out=out, **keywords)
    before, after = result.effect.accuracy
    for path, accuracy in ((files / "model.pt", before), (out, after)):
        measured = evaluate_model(path, files / "data", split="val", device="cpu", threads=1, log=print)
        assert measured.evaluation.evaluation.accuracy == pytest.approx(accuracy)
    assert result.metadata.edits[-1]["measured"]["accuracy"] == [before, after]
    text = page.read_text(encoding="utf-8")
    assert all(f"{names[0]}/{slot}" in text for slot in range(3))
    # both may be passed on
    assert str(files) not in text
    assert str(files).encode() not in out.read_bytes()
    assert text.count("<figcaption>") == len(result.effect.changed)


def test_edits_add_up_and_a_restored_slot_is_what_it_was(files, names, tmp_path):
    first, second, third = (tmp_path / f"{number}.pt" for number in range(3))
    keywords = {"threads": 1, "log": print}
    edit_model(files / "model.pt", drop=[f"{names[0]}/0"], out=first, **keywords)
    edit_model(first, drop=[f"{names[1]}/2"], out=second, **keywords)
    edited = edit_model(second, restore=[f"{names[0]}/0", f"{names[1]}/2"], out=third, **keywords)
    assert [edit["dropped"] for edit in edited.metadata.edits] == [[f"{names[0]}/0"], [f"{names[1]}/2"], []]
    images = example_images(4, 64, 64)
    before, after = (
        open_sessions(path, device="cpu", threads=1)[0].run(images) for path in (files / "model.pt", third)
    )
    assert (before.logits == after.logits).all()


def test_the_temperature_is_fitted_again_on_validation_images_or_marked_as_the_parents(files, names, tmp_path):
    parent = tmp_path / "parent.pt"
    labels = np.arange(200) % 3
    noise = np.random.default_rng(0).normal(size=(200, 3))
    old = calibrate((noise + np.eye(3)[labels]).astype(np.float32), labels)
    assert old.temperature is not None
    save(parent, replace(checkpoint.load(files / "model.pt"), calibration=old))
    keywords = {"drop": [(names[0], 1)], "device": "cpu", "threads": 1, "log": print}
    for number, (data, split) in enumerate([({}, "val"), ({"data": files / "data"}, "test")]):
        out = tmp_path / f"{number}.pt"
        edit_model(parent, out=out, split=split, **data, **keywords)
        kept = checkpoint.load(out).calibration
        assert (kept.temperature, kept.split) == (old.temperature, "val (before the edit)")
    result = edit_model(parent, out=tmp_path / "fitted.pt", data=files / "data", **keywords)
    ((pixels, _),) = prepared_batches(read_dataset(files / "data").val, (64, 64), batch=51)
    logits = open_sessions(tmp_path / "fitted.pt", device="cpu", threads=1)[0].run(pixels).logits
    fitted = checkpoint.load(tmp_path / "fitted.pt").calibration
    expected = calibrate(logits, result.scores.labels).temperature
    assert (fitted.images, fitted.split, fitted.temperature) == (51, "val", pytest.approx(expected, rel=1e-4))


@pytest.mark.parametrize("suffix", [".pt", ".onnx"])
def test_risk_and_baseline_are_those_that_the_edited_model_measures(files, names, tmp_path, suffix):
    out, lines = tmp_path / f"edited{suffix}", []
    keywords = {"device": "cpu", "threads": 1}
    model, data = files / f"model{suffix}", files / "data"
    edit_model(model, drop=[(names[0], 1)], data=data, out=out, log=lines.append, **keywords)
    edited = read_model_metadata(out)
    measured = evaluate_model(out, data, split="val", record=True, log=print, **keywords)
    recorded = read_model_metadata(out)
    assert edited.risk["aurc"] == pytest.approx(recorded.risk["aurc"])
    assert edited.risk["error"] == pytest.approx(1 - measured.evaluation.evaluation.accuracy)
    baseline, again = edited.known_baseline, recorded.known_baseline
    assert baseline.classes == again.classes
    for name, quantiles in again.quantiles.items():
        np.testing.assert_allclose(baseline.quantiles[name], quantiles, rtol=1e-3, atol=1e-5, err_msg=name)
    assert not any("not its own" in line for line in lines)


def test_diff_says_what_was_edited_and_counts_slots_of_only_one_model(files, names, tmp_path, opal):
    out = tmp_path / "edited.onnx"
    drop = [f"{name}/1" for name in names]
    edit_model(files / "model.onnx", drop=drop, out=out, reason="the stamp", threads=1, log=print)
    done = opal("diff", files / "model.onnx", out, files / "data" / "val")
    assert f"edited.onnx was edited: dropped {', '.join(drop)}: the stamp; from model.onnx" in done.stderr
    assert "slots moved, " in done.stderr
    assert "1 slot in only one model" in done.stderr


REFUSED = [
    (["--drop", "Nobody/0", "--out", "x.pt"], "the model has no class 'Nobody'"),
    (["--drop", "{0}/3", "--out", "x.pt"], "has no slot '3'; expected 0 to 2"),
    (["--drop", "{0}/-1", "--out", "x.pt"], "has no slot '-1'"),
    (["--drop", "{0}", "--out", "x.pt"], "expected CLASS/SLOT"),
    (["--drop", "{0}/1", "--drop", "{0}/1", "--out", "x.pt"], "given twice"),
    (["--drop", "{0}/0", "--drop", "{0}/1", "--drop", "{0}/2", "--out", "x.pt"], "{0} would have no slot left"),
    (["--restore", "{0}/1", "--out", "x.pt"], "was not dropped"),
    (["--drop", "{0}/1"], "give --out FILE"),
    (["--drop", "{0}/1", "--out", "x.onnx"], "expected a name that ends in .pt"),
    (["--drop", "{0}/1", "--out", "model.pt", "--overwrite"], "this call reads that file"),
    (["--out", "x.pt"], "nothing to do"),
    (["--suggest"], "--suggest: needs labelled images; add --data"),
    (
        ["--drop", "{0}/1", "--annotations", "x.json", "--no-boxes", "--out", "x.pt"],
        "--no-boxes, --annotations: nothing",
    ),
    (["--suggest", "--data", "nowhere"], "nowhere"),
    (["--drops", "nowhere.toml", "--out", "x.pt"], "nowhere.toml: cannot be read"),
    (["--drop", "{0}/1", "--data", "data", "--page", "x.pt", "--out", "./x.pt"], "--out and --page are the same file"),
    (["--suggest", "--data", "data", "--page", "..", "--overwrite"], "..: cannot be written (a folder has that name)"),
    (["--suggest", "--data", "data", "--background", "nowhere"], "nowhere: no such folder"),
    (["--drop", "{0}/1", "--data", "data", "--background", "data"], "--background: serves to find slots"),
    (["--drop", "{0}" + "x" * 10_000 + "/1", "--out", "x.pt"], "the model has no class"),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED, ids=[" ".join(arguments)[:60] for arguments, _ in REFUSED])
def test_what_cannot_be_edited_is_one_line_and_writes_nothing(files, names, tmp_path, opal, arguments, expected):
    shutil.copy(files / "model.pt", tmp_path)
    done = opal("edit", "model.pt", *(each.format(*names) for each in arguments), cwd=tmp_path)
    assert done.returncode == 2
    assert expected.format(*names) in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


DROPS = {
    "empty": b"",
    "number": b"drop = 1",
    "other values": b'drop = ["a/0", 3]',
    "another key": b'drop = ["a/0"]\nkeep = []',
    "many keys": b"\n".join(b"key%d = 1" % i for i in range(3000)),
    "not TOML": b"drop = [",
    "huge number": b"drop = [" + b"9" * 5_000 + b"]",
    "huge hexadecimal number": b"0" + b"x" * 5_000 + b" = 0x" + b"f" * 10_000,
    "huge slot": b'drop = ["{0}/' + b"9" * 10_000 + b'"]',
    "nested": b"drop = " + b"[" * 50_000,
    "not UTF-8": b'drop = ["\xff/0"]',
    "folder": None,
    "pipe": None,
}


@pytest.mark.parametrize("case", DROPS)
def test_other_files_of_drops_are_refused(files, names, tmp_path, case):
    drops = tmp_path / "drops.toml"
    content = DROPS[case]
    if content is not None:
        drops.write_bytes(content.replace(b"{0}", names[0].encode()))
    else:
        (os.mkfifo if case == "pipe" else os.mkdir)(drops)
    with pytest.raises(UsageError, match="expected") as caught:
        edit_model(files / "model.onnx", drops=drops, out=tmp_path / "x.onnx")
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "x.onnx").exists()


def test_engines_and_models_without_single_cells_are_refused(files, map_model, tmp_path):
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"")
    for path, expected in ((engine, "an engine cannot be edited"), (map_model, "do not come from single cells")):
        with pytest.raises(UsageError, match=expected):
            edit_model(path, drop=["a/0"], out=tmp_path / f"x{path.suffix}")


def test_figures_are_json(files, names, opal):
    done = opal("edit", files / "model.onnx", "--drop", f"{names[1]}/1", "--data", files / "data", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["model"] is None
    assert document["effect"]["images"] == 51
