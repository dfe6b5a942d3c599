"""The programs of docs/howto/any-runtime.md, as they stand, answer and explain an image as `infer` does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import opal_deploy
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.synthetic import draw_example
from tests.browser import ORT_WEB, needs_ort_web, open_browser, serve_folders
from tests.builders import build_checkpoint, export_onnx

PAGE = (Path(__file__).parents[2] / "docs/howto/any-runtime.md").read_text("utf-8")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") and Path("/usr/include/stb/stb_image.h").is_file()), reason="no g++, or no libstb-dev"
)


OFFSET = -0.3


def program(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, opal):
    """A folder with the files that the page's programs read, and an image."""
    folder = tmp_path_factory.mktemp("programs")
    checkpoint = build_checkpoint()
    # boxes that lie off the cells' places
    checkpoint.receptive_field = ReceptiveField(checkpoint.network.backbone.stride, box_offset=OFFSET)
    export_onnx(checkpoint, folder / "best.onnx", input="image")
    described = opal("inspect", folder / "best.onnx", "--json").stdout
    (folder / "best.json").write_text(described)
    (folder / "labels.txt").write_text("\n".join(json.loads(described)["metadata"]["class_names"]))
    Image.fromarray(draw_example(3, 150, 211)).save(folder / "image.png")
    return folder


def check(printed, folder):
    label, *slots = printed.splitlines()
    record = opal_deploy.load(folder / "best.onnx").predict(folder / "image.png").record
    assert label == record.prediction.label
    assert len(slots) == len(record.evidence)
    for slot, evidence in zip(slots, sorted(record.evidence, key=lambda slot: slot.slot), strict=True):
        score, *box = map(float, slot.split())
        assert score == pytest.approx(evidence.score, abs=0.01)
        assert box == pytest.approx(evidence.box, abs=0.06)


def test_python(folder):
    arguments = [sys.executable, "-c", program("python"), "image.png"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(done.stdout, folder)


@pytest.mark.slow
@needs_compiler
def test_cpp(folder):
    openvino = pytest.importorskip("openvino").__path__[0]
    metadata = json.loads((folder / "best.json").read_text())["metadata"]
    (rows, columns), slots = metadata["grid"], metadata["prototypes_per_class"]
    code = (
        program("cpp")
        .replace("offset = 0;", f"offset = {OFFSET};")
        .replace("rows = 14, columns = 14, slots = 5", f"{rows = }, {columns = }, {slots = }")
    )
    (folder / "explain.cpp").write_text(code)
    command = re.search(r"^\$ (g\+\+ .*)$", PAGE, re.MULTILINE)[1]
    subprocess.run(["sh", "-c", command], cwd=folder, env={"PATH": "/usr/bin:/bin", "OPENVINO": openvino}, check=True)
    done = subprocess.run(["./explain", "image.png"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(done.stdout, folder)


@pytest.mark.slow
@pytest.mark.browser
@needs_ort_web
def test_javascript(folder):
    (folder / "explain.mjs").write_text(program("javascript"))
    (folder / "index.html").write_text('<input type="file">')

    with open_browser() as browser:
        page = browser.new_page()
        serve_folders(page, folder, ORT_WEB / "dist")
        page.goto("http://localhost/")
        page.locator("input").set_input_files(folder / "image.png")
        code = "async (input) => (await import('/explain.mjs')).explain(input.files[0])"
        check(page.locator("input").evaluate(code), folder)
