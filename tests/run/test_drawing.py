"""Drawings of a run: overlays and the report of a run on disk. The content of evidence sheets."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import UsageError
from opal_deploy.predict import prepare
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.run.directory import read_records
from opal_deploy.run.drawing import ReportOptions, build_sheet, describe_report, open_report
from opal_deploy.run.setup import RunOptions
from opal_deploy.sources.image import InputImage
from tests.bright import BrightSession, save, write_run
from tests.cli.calls import read_results


@pytest.fixture
def images(tmp_path):
    """Six of rising brightness, the third one broken."""
    for number in range(6):
        save(tmp_path / f"in/{number}.png", (64, 48), 40 * number)
    (tmp_path / "in/2.png").write_bytes(b"no")
    return tmp_path / "in"


def run_in(out, images, session, **options):
    out.mkdir(exist_ok=True)
    run = RunOptions(out, InferenceOptions(batch=4, **options), ReportOptions())
    return write_run(run, (InputImage(path.name, path) for path in sorted(images.iterdir())), session)


def test_overlays_cost_no_forward_pass(images, tmp_path):
    session = BrightSession()
    # reduced before it is drawn on
    save(images / "6.png", (2500, 2400))
    run_in(tmp_path / "out", images, session)
    assert session.batches == [4, 3]
    written = [record.get("overlay") for record in read_results(tmp_path / "out")]
    assert written == [None if n == 2 else f"overlays/00000{n}-{n}.jpg" for n in range(7)]
    assert len(list((tmp_path / "out/overlays").iterdir())) == 6


# in the drawing processes: the shade of a photograph says how its drawing goes wrong
MISBEHAVING = """
import os, signal, time
from PIL import ImageDraw

draw = ImageDraw.Draw

def misbehave(canvas):
    shade = canvas.getpixel((0, 0))[0]
    if shade == 40:
        os.kill(os.getpid(), signal.SIGSEGV)
    if shade == 120:
        raise MemoryError
    if shade == 160:
        time.sleep(600)
    return draw(canvas)

ImageDraw.Draw = misbehave
"""


def test_a_drawing_that_crashes_hangs_or_finds_no_memory_costs_itself_only(images, tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(MISBEHAVING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    out, plain = tmp_path / "out", tmp_path / "plain"
    summary = run_in(out, images, BrightSession(), isolate=True, decode_timeout=4)
    records = read_results(out)
    codes = [None, "drawing_crashed", None, "drawing_failed", "drawing_timeout", None]
    assert [record.get("drawing_error", {}).get("code") for record in records] == codes
    assert [record["status"] for record in records] == ["ok", "ok", "error", "ok", "ok", "ok"]
    assert ["overlay" in record for record in records] == [True, *[False] * 4, True]
    assert summary.to_dict()["drawing_errors"] == {code: 1 for code in codes if code}
    # the page shows the reason
    assert (out / "report.html").read_text("utf-8").count('"undrawn":"not drawn: ') == 3
    # the same drawings without processes
    run_in(plain, images, BrightSession())
    name = records[5]["overlay"]
    assert (plain / name).read_bytes() == (out / name).read_bytes()


def test_an_image_that_memory_cannot_hold_until_it_is_drawn_keeps_its_record(images, tmp_path, monkeypatch):
    def keep(image):
        if image.getpixel((0, 0))[0] == 40:
            raise MemoryError
        return image

    monkeypatch.setattr(prepare, "to_display", keep)
    run_in(tmp_path / "out", images, BrightSession())
    records = read_results(tmp_path / "out")
    assert [record["status"] for record in records] == ["ok", "ok", "error", "ok", "ok", "ok"]
    assert ["drawing_error" in record for record in records] == [False, True, *[False] * 4]


def test_a_place_where_overlays_cannot_go_is_a_wrong_call(images, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/overlays").write_text("a file")
    with pytest.raises(UsageError, match="--out"):
        run_in(tmp_path / "out", images, BrightSession())


# ---- the report

PREDICTION = {"class_id": 0, "label": "Auklet", "logit": -0.5, "cosine": 0.9}


def test_a_report_is_named_after_its_images_and_model_without_secrets():
    inputs = ["https://host/birds.zip?X-Amz-Signature=1", "b.jpg"]
    options = describe_report(Path("/home/ann/m.onnx"), BrightSession().metadata, inputs, runtime="", command="")
    assert options.title == "birds.zip and 1 more, explained by m.onnx"


def test_an_overlay_that_is_gone_costs_its_image_only(tmp_path):
    document = {
        "schema": 1, "image": "a.jpg", "status": "ok", "width": 60, "height": 40, "prediction": PREDICTION,
        "margin": 0.5, "top": [PREDICTION], "overlay": "overlays/000000-a.jpg",
    }  # fmt: skip
    (tmp_path / "results.jsonl").write_text(json.dumps(document) + "\n")
    with open_report(tmp_path, ReportOptions(), 1) as add:
        for record in read_records(tmp_path / "results.jsonl"):
            add(record)
    assert '<script type="text/plain"' not in (tmp_path / "report.html").read_text("utf-8")


# ---- the content of sheets

OPTIONS = InferenceOptions(batch=1, workers=1, keep_images=True, keep_outputs=True)


def test_a_box_crops_the_view_and_places_stay_those_of_the_whole_image(tmp_path):
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[40:48, 48:56] = 250
    Image.fromarray(pixels).save(tmp_path / "a.png")
    session, image = BrightSession(), InputImage("a.png", tmp_path / "a.png", (32, 32, 64, 64))
    (result,) = predict_stream([image], [session], OPTIONS)
    sheet = build_sheet(result, session.metadata)
    assert sheet.record.evidence[0].box == (48.0, 40.0, 56.0, 48.0)
    # JSON names the runner-up's slots too
    assert sheet.document["evidence"][0]["box"] == [48.0, 40.0, 56.0, 48.0]
    assert [slot["slot"] for slot in sheet.document["runner_up_evidence"]] == [0, 1]
