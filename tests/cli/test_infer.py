"""`opal-deploy infer` end to end: exit codes, messages, files, names, and what it leaves beside its records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.files import compute_sha256
from tests.cli.calls import MAIN, check, one_line, read_results


@pytest.fixture
def pictures(tmp_path, make_pictures):
    make_pictures(tmp_path / "in", 4)
    return tmp_path / "in"


@pytest.fixture
def infer(opal, exact_model, tmp_path):
    """`infer` with the model and an --out given, in an empty folder; images are decoded in this process."""

    def run(*arguments, model=exact_model, out="out", **options):
        fixed = ["--model", model, "--out", out, "--threads", "1", "--no-isolate"]
        return opal("infer", *arguments, *fixed, cwd=tmp_path, **options)

    return run


def test_the_documented_call_works_as_written(opal, exact_model, pictures, tmp_path):
    (tmp_path / "ckpt.onnx").write_bytes(exact_model.read_bytes())
    done = opal("infer", "in/", "--explain", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Model: ckpt.onnx" in done.stderr
    assert "4 images in" in done.stderr
    out = tmp_path / "explanations"
    assert [Path(r["image"]).name for r in read_results(out)] == ["000.png", "001.png", "002.png", "003.png"]
    assert len(list((out / "overlays").iterdir())) == 4
    assert (out / "report.html").read_text(encoding="utf-8").count('<script type="text/plain"') == 4
    # as `train` and `export` leave it
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "ckpt.onnx").rename(tmp_path / "runs/mine/best.onnx")
    done = check(opal("infer", "in/000.png", "--out", "again", cwd=tmp_path))
    assert f"Model: {Path('runs/mine/best.onnx')} (of the newest " in done.stderr


def test_failed_and_passed_over_files_are_counted(infer, pictures, exact_model, tmp_path):
    (pictures / "bad.jpg").write_bytes(b"no")
    (pictures / "empty.jpg").write_bytes(b"")
    (pictures / "notes\x1b[31m.txt").write_text("x")
    out = tmp_path / "o\x1b[1m"
    done = check(infer(pictures, "--explain", out=out), 3)
    # a name must not drive the terminal
    assert "\x1b" not in done.stderr
    for text in (
        "6 images in",
        "2 error, 4 ok",
        f"not_an_image: 1 ({pictures}/bad.jpg)",
        f"empty_file: 1 ({pictures}/empty.jpg)",
        "Skipped 1 hidden or non-image files (notes\\x1b[31m.txt)",
    ):
        assert text in done.stderr
    assert len(read_results(out)) == 6
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count('"overlay":"overlays/') == 4
    assert f"<title>{pictures.name}, explained by {exact_model.name}</title>" in page
    # whoever is handed the report learns nothing of the machine's folders
    assert str(tmp_path) not in page
    assert str(exact_model.parent) not in page


def test_an_out_that_cannot_be_is_a_wrong_call_also_with_debug(infer, pictures, tmp_path):
    (tmp_path / "file").write_text("x")
    done = check(infer(pictures, "--debug", out="file/out"), 2)
    assert "Traceback" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "opal-deploy: file/out: cannot be written (Not a directory); give another --out" in last


def test_what_models_without_single_cells_can_and_cannot_do(infer, map_model, linear_model, pictures, tmp_path):
    line = one_line(infer(pictures, "--explain", model=linear_model))
    assert "a dense layer mixes all channels and no evidence can be shown; leave out --explain" in line
    assert "no margin; leave out --min-margin" in one_line(infer(pictures, "--min-margin", "0.1", model=linear_model))
    assert infer(pictures, model=linear_model).returncode == 0
    assert read_results(tmp_path / "out")[0]["prediction"]["cosine"] is None

    done = check(infer(pictures, "--explain", model=map_model, out="map"))
    assert "no single cell is its evidence, so overlays show no boxes" in done.stderr
    assert (tmp_path / "map/report.html").is_file()


def test_12_bit_data_in_16_bit_files_are_counted_as_nearly_black(infer, pictures, tmp_path):
    Image.fromarray(np.full((96, 96), 4095, np.uint16)).save(pictures / "dark.png")
    assert "nearly black: 1," in infer(pictures).stderr
    assert json.loads((tmp_path / "out/summary.json").read_bytes())["nearly_black"] == 1


def test_a_bug_is_called_one(infer, pictures, monkeypatch):
    monkeypatch.setattr("opal_deploy.run.infer.write_records", lambda *_, **__: {}["x\ny"])
    done = check(infer(pictures), 1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("opal-deploy: internal error: KeyError: ")
    assert last.endswith("Please report it with the output of the command run with --debug.")
    assert "Traceback" not in done.stderr


KNOWN_CODES = {
    "empty_file", "not_an_image", "truncated_image", "corrupt_image", "too_many_pixels", "unsupported_image",
}  # fmt: skip


@pytest.mark.data
def test_every_odd_image_gets_its_record_and_memory_is_bounded(exact_model, odd_images, tmp_path):
    # not getrusage: its peak of a child includes the process that started it
    measure = (
        "import atexit, re\n"
        "def peak(): print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "atexit.register(peak)\n"
    )
    arguments = ["infer", odd_images, "--model", exact_model, "--out", tmp_path / "out", "--explain"]
    command = [sys.executable, "-c", measure + MAIN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning:" not in done.stderr
    # in kilobytes
    assert int(done.stdout) < 1_000_000
    found = read_results(tmp_path / "out")
    assert len(found) == 149
    assert [record["image"] for record in found] == sorted(record["image"] for record in found)
    assert {record["error"]["code"] for record in found if record["status"] == "error"} <= KNOWN_CODES
    assert {record["status"] for record in found} == {"ok", "error"}
    assert all(("overlay" in record) == (record["status"] == "ok") for record in found)


def test_names_on_stdin_need_not_be_utf8_and_a_closed_stdout_changes_no_exit_code(exact_model, pictures, tmp_path):
    (tmp_path / os.fsdecode(b"a\xff.png")).write_bytes((pictures / "000.png").read_bytes())
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "infer", "-", "--model", str(exact_model), "--out", "out", "--json"],
        cwd=tmp_path,
        input=b"in/002.png\na\xff.png\nin/000.png\n",
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert b"rror" not in done.stderr
    assert [record["image"] for record in read_results(tmp_path / "out")] == ["in/002.png", "a\\xff.png", "in/000.png"]


# ---- beside the records


@pytest.fixture
def labelled(pictures):
    """Two folders named for classes and one for none of them, two images in each, one of them broken."""
    for number, name in enumerate(("ash/0", "birch/2", "birch/3", "lion/4")):
        (pictures / name).parent.mkdir(exist_ok=True)
        (pictures / f"{number:03}.png").rename(pictures / f"{name}.png")
    (pictures / "lion/5.png").write_bytes((pictures / "ash/0.png").read_bytes())
    (pictures / "ash/1.png").write_bytes(b"no")
    return pictures


def test_everything_beside_the_records_agrees_with_them(infer, labelled, exact_model, tmp_path):
    done = check(infer(labelled, "--labels", "folders", "--format", "csv", "--format", "parquet", "--json"), 3)
    found = read_results(tmp_path / "out")
    assert [record["label"] for record in found] == ["ash"] * 2 + ["birch"] * 2 + ["lion"] * 2

    correct = sum(r["label"] == r["prediction"]["label"] for r in found if "prediction" in r and r["label"] != "lion")
    assert f"Accuracy: {correct} of 3 (" in done.stderr
    assert "images that are not counted: 1 failed, 2 have no class's label" in done.stderr

    text = (tmp_path / "out/summary.json").read_text()
    document = json.loads(text)
    assert json.loads(done.stdout) == document
    expected = {"complete": True, "stopped": None, "images": 6, "errors": {"not_an_image": 1}, "resumed": []}
    assert {key: document[key] for key in expected} == expected
    assert document["accuracy"]["correct"] == correct
    assert document["model"] == {"file": exact_model.name, "sha256": compute_sha256(exact_model)}
    assert "cpu" in document["runtime"].lower()
    assert document["images_per_second"] == pytest.approx(6 / document["seconds"])
    assert {"decode", "compute", "write"} <= {row["stage"] for row in document["time"]["stages"]}
    assert document["started"] <= document["ended"]
    # nobody's folders
    assert document["command"].startswith(
        f"opal-deploy infer in --model {exact_model.name} --out out --labels folders --format csv"
    )
    assert str(tmp_path) not in text
    assert {path.name for path in (tmp_path / "out").glob("results.*")} == {
        "results.jsonl", "results.csv", "results.parquet",
    }  # fmt: skip


def test_images_without_a_label_and_rows_without_an_image_are_named_for_any_decoder(infer, labelled, tmp_path):
    (tmp_path / "labels.csv").write_text("image,label\nash/0.png,birch\nbirch/2.png,birch\nold/9.png,ash\n")
    for decode in ("exact", "fast"):
        done = check(infer(labelled, "--labels", "labels.csv", "--overwrite", "--decode", decode, "--explain"), 3)
        found = read_results(tmp_path / "out")
        assert [record.get("label") for record in found] == ["birch", None, "birch", None, None, None]
        assert "4 have no label" in done.stderr
        assert "rows of the labels that match no image: 1 (old/9.png)" in done.stderr
        assert [record["status"] for record in found].count("ok") == sum("overlay" in r for r in found) == 5


def test_closed_streams_are_no_error(exact_model, pictures, tmp_path):
    # as services and windowed programs start it
    out = tmp_path / "out"
    call = f"{sys.executable} -m opal_deploy infer {pictures} --model {exact_model} --no-isolate --out {out}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", f"exec {call} >&- 2>&-"], timeout=120, env=environment)
    assert done.returncode == 0
    assert read_results(out)
