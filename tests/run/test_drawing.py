"""Drawings of a run: sheets from the outputs of its own forward passes, and the report of a run on the disk."""

import json
import os
import re
from pathlib import Path

import pytest
from PIL import Image

from opal_deploy.api.atlas import collect_images
from opal_deploy.errors import StoppedEarly
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.records.names import find_common_folder
from opal_deploy.run.drawing import ReportOptions, open_report, report_title
from opal_deploy.run.results import read_records
from opal_deploy.run.run import LocalBackend, RunOptions, run
from opal_deploy.run.sheets import SheetBuilder, SheetOptions
from opal_deploy.sources.image import InputImage
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.storage import build_atlas, save_atlas
from opal_deploy.workers.pool import ProcessPool
from opal_deploy.workers.process import WorkerTimeout
from tests.bright import BrightSession, read_results, save


@pytest.fixture
def images(tmp_path):
    """Six of rising brightness, the third one broken."""
    for number in range(6):
        save(tmp_path / f"in/{number}.png", (64, 48), 40 * number)
    (tmp_path / "in/2.png").write_bytes(b"no")
    return tmp_path / "in"


def requests(folder):
    return [InputImage(path.name, path) for path in sorted(folder.iterdir())]


def run_in(out, images, session, sheets=None, resume=False):
    out.mkdir(exist_ok=True)
    builder = SheetBuilder(session.metadata, sheets)
    options = RunOptions(out, InferenceOptions(batch=4), sheets=builder, resume=resume)
    return run(iter(requests(images)), LocalBackend([session]), options)


def test_sheets_cost_no_forward_pass(images, tmp_path):
    session = BrightSession()
    # reduced before it is drawn on
    save(images / "6.png", (2500, 2400))
    run_in(tmp_path / "out", images, session)
    assert session.batches == [4, 3]
    written = [record.get("sheet") for record in read_results(tmp_path / "out")]
    assert written == [None if n == 2 else f"sheets/00000{n}-{n}.png" for n in range(7)]
    assert len(list((tmp_path / "out/sheets").iterdir())) == 6


def test_a_damaged_atlas_stops_the_run_and_a_whole_one_lets_it_go_on(images, tmp_path):
    session = BrightSession()
    collector = AtlasCollector(session.metadata, 3)
    collect_images(requests(images), [session], InferenceOptions(workers=1), collector)
    atlas = build_atlas(collector, tmp_path / "atlas", {"file": "m.onnx", "sha256": "ab"}, {})
    save_atlas(atlas)
    patches = sorted((tmp_path / "atlas/patches").rglob("*.jpg"))
    whole = [patch.read_bytes() for patch in patches]
    for patch in patches:
        patch.write_bytes(b"no jpeg")
    with pytest.raises(StoppedEarly, match="build the atlas again"):
        run_in(tmp_path / "out", images, session, SheetOptions(atlas=atlas))
    for patch, content in zip(patches, whole, strict=True):
        patch.write_bytes(content)
    assert run_in(tmp_path / "out", images, session, SheetOptions(atlas=atlas), resume=True).total == 6
    assert len(list((tmp_path / "out/sheets").iterdir())) == 5


# in the drawing processes: the shade of a photograph says how its drawing goes wrong
MISBEHAVING = """
import os, signal
from PIL import ImageDraw

draw = ImageDraw.Draw

def misbehave(canvas):
    shade = canvas.getpixel((0, 0))[0]
    if shade == 40:
        os.kill(os.getpid(), signal.SIGSEGV)
    if shade == 120:
        raise MemoryError
    return draw(canvas)

ImageDraw.Draw = misbehave
"""


def test_a_drawing_that_crashes_hangs_or_finds_no_memory_costs_itself_alone(images, tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(MISBEHAVING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    call = ProcessPool.call

    def hang(pool, request, *how):
        if isinstance(request, tuple) and getattr(getattr(request[0], "record", None), "image", None) == "4.png":
            raise WorkerTimeout
        return call(pool, request, *how)

    monkeypatch.setattr(ProcessPool, "call", hang)
    out = tmp_path / "out"
    out.mkdir()
    session = BrightSession()
    options = RunOptions(out, InferenceOptions(batch=4, isolate=True), ReportOptions(), SheetBuilder(session.metadata))
    summary = run(iter(requests(images)), LocalBackend([session]), options)
    records = read_results(out)
    codes = [None, "drawing_crashed", None, "drawing_failed", "drawing_timeout", None]
    assert [record.get("drawing_error", {}).get("code") for record in records] == codes
    assert [record["status"] for record in records] == ["ok", "ok", "error", "ok", "ok", "ok"]
    assert ["overlay" in record and "sheet" in record for record in records] == [True, *[False] * 4, True]
    assert summary.to_dict()["drawing_errors"] == {code: 1 for code in codes if code}
    # the page shows the reason
    assert (out / "report.html").read_text("utf-8").count('"no-image">not drawn: ') == 3
    # the same drawings without processes
    plain = tmp_path / "plain"
    plain.mkdir()
    again = RunOptions(plain, InferenceOptions(batch=4), ReportOptions(), SheetBuilder(session.metadata))
    run(iter(requests(images)), LocalBackend([session]), again)
    for name in (records[5]["overlay"], records[5]["sheet"]):
        assert (plain / name).read_bytes() == (out / name).read_bytes()


# ---- the report

PREDICTION = {"class_id": 0, "label": "Auklet", "logit": -0.5, "cosine": 0.9}


def make_run(out, count, *, overlays=True):
    """Write records without evidence, the later the more certain, and their overlays."""
    (out / "overlays").mkdir(parents=True)
    with (out / "results.jsonl").open("w") as stream:
        for i in range(count):
            name = f"overlays/{i:06}-{i}.jpg"
            record = {
                "schema": 1, "image": f"{i}.jpg", "status": "ok", "width": 60, "height": 40,
                "prediction": PREDICTION, "margin": i / 1000, "top": [PREDICTION], "overlay": name,
            }  # fmt: skip
            stream.write(json.dumps(record) + "\n")
            if overlays:
                Image.new("RGB", (300, 120), (20, 40, 60)).save(out / name)
    return out


def write_report(out, options):
    records = list(read_records(out / "results.jsonl"))
    folder = find_common_folder(record.image for record in records)
    with open_report(out, options, len(records), folder) as add:
        for record in records:
            add(record)


def sources(out):
    return re.findall(r' src="([^",]*)', (out / "report.html").read_text(encoding="utf-8"))


# few, many, few of many, and as an option says
@pytest.mark.parametrize(
    ("count", "limit", "images", "embedded"),
    [(3, 100, None, True), (201, 1000, None, False), (201, 200, None, True), (3, 100, "files", False)],
)
def test_where_the_reports_images_are(tmp_path, count, limit, images, embedded):
    out = make_run(tmp_path / "out", count)
    write_report(out, ReportOptions(limit=limit, images=images))
    assert len(sources(out)) == min(count, 48)
    assert {source.startswith("data:image/jpeg") for source in sources(out)} == {embedded}
    assert sorted(path.name for path in out.iterdir()) == ["overlays", "report.html", "results.jsonl"]


def test_a_report_that_is_handed_on_does_not_tell_where_its_images_lie(tmp_path):
    out = make_run(tmp_path / "out", 3)
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    for record, name in zip(records, ("set/a/0.jpg", "set/b/1.jpg", "set/b/2.jpg"), strict=True):
        record["image"] = str(tmp_path / name)
    (out / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_report(out, ReportOptions())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert all(f'"{name}"' in page for name in ("a/0.jpg", "b/1.jpg", "b/2.jpg"))
    assert "relative to their common folder" in page


@pytest.mark.parametrize(
    ("inputs", "model", "title"),
    [
        (["photos/"], "runs/pets/best.onnx", "photos, explained by pets/best.onnx"),
        (["demo/data/test", "b.jpg"], "m.onnx", "data/test and 1 more, explained by m.onnx"),
        (["/home/ann/birds"], "/home/ann/m.onnx", "birds, explained by m.onnx"),
        (["https://host/birds.zip?X-Amz-Signature=1"], "m.onnx", "host/birds.zip, explained by m.onnx"),
        (["-"], "m.onnx", "standard input, explained by m.onnx"),
        (["."], "m.onnx", "here, explained by m.onnx"),
    ],
)
def test_a_report_is_named_after_its_images_and_model(tmp_path, monkeypatch, inputs, model, title):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert report_title(inputs, Path(model)) == title


def test_an_overlay_that_is_gone_costs_its_image_only(tmp_path):
    out = make_run(tmp_path / "out", 2, overlays=False)
    write_report(out, ReportOptions(limit=100))
    assert sources(out) == []
    assert re.search("image not kept", (out / "report.html").read_text(encoding="utf-8"))
