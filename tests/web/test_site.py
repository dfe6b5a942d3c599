"""The site for browsers: what is written, and what a real browser answers."""

import functools
import http.server
import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image, ImageCms
from playwright.sync_api import expect, sync_playwright

import opal_deploy
from opal_deploy.api.atlas import create_atlas
from opal_deploy.artifact import onnx_file
from opal_deploy.records.lines import to_document
from opal_deploy.records.record import to_record
from opal_deploy.synthetic import example_images
from tests.browser import AXE, CHROMIUM, ORT_WEB, find_violations, needs_chromium, needs_ort_web
from tests.records.test_schema import validator

GOLDEN = Path(__file__).parents[1] / "golden"
# a GPU and a camera of software
FLAGS = (
    "--no-sandbox --disable-background-networking --enable-unsafe-webgpu --use-webgpu-adapter=swiftshader "
    "--use-fake-device-for-media-stream --use-fake-ui-for-media-stream"
)
RESIZE = """async ([pixels, width, height]) => {
  const { resize } = await import("/model.js");
  return [...resize(pixels, width, height, 96, 96)];
}"""


@pytest.fixture(scope="module")
def site(exact_model, tmp_path_factory):
    """The folder of a site."""
    folder = tmp_path_factory.mktemp("web") / "site"
    opal_deploy.export_web(exact_model, folder, ort_web=ORT_WEB, threads=1, log=lambda text: None)
    return folder


@pytest.fixture(scope="module")
def visit():
    """Open a folder in a browser, from a server on this machine; fails if the page asks another one."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        elsewhere, servers = [], []

        def open_page(folder, width=1280):
            handler = functools.partial(Quiet, directory=str(folder))
            servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
            own = f"http://localhost:{servers[-1].server_port}/"
            page = browser.new_page(viewport={"width": width, "height": 800})
            page.set_default_timeout(60_000)
            page.on("pageerror", lambda error: elsewhere.append(str(error)))
            page.on("request", lambda request: elsewhere.append(request.url))
            page.goto(own)
            page.wait_for_selector("html[data-ready], #status.alert")
            return page

        yield open_page
        assert [url for url in elsewhere if not url.startswith(("http://localhost:", "blob:", "data:"))] == []
        for server in servers:
            server.shutdown()
            server.server_close()
        browser.close()


def ask(page, path):
    """Return the record that the page shows for a picture."""
    page.locator("#file").set_input_files(path)
    expect(page.locator("#status")).to_contain_text(re.compile("Answered|No answer|not a picture"))
    return json.loads(page.locator("#record").text_content())


@needs_ort_web
@pytest.mark.browser
@needs_chromium
class TestPage:
    @pytest.mark.parametrize(("mode", "suffix"), [("RGB", "png"), ("L", "png"), ("RGBA", "png"), ("RGB", "jpg")])
    def test_a_picture_has_the_record_that_infer_writes(self, site, exact_model, visit, tmp_path, mode, suffix):
        page = visit(site)
        expect(page.locator("#checked")).to_contain_text("cells as in PyTorch")
        (pixels,) = example_images(1, 130, 211)
        picture = Image.fromarray(pixels).convert(mode)
        if mode == "RGBA":
            # wholly transparent or not at all: what lies between is rounded differently
            picture.putalpha(Image.fromarray(np.where(pixels[..., 0] > 100, 255, 0).astype(np.uint8)))
        path = tmp_path / f"picture.{suffix}"
        # which neither applies
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
        picture.save(path, icc_profile=profile, quality=95, subsampling=0)
        record = ask(page, path)
        expected = opal_deploy.load(exact_model, device="cpu", threads=1).explain(path)
        assert record.keys() == {*expected, "image_sha256", "model_sha256"}
        validator(strict=True).validate(record)
        assert to_document(to_record(record)).keys() == record.keys()
        for answer, one in zip(record["top"] + record["evidence"], expected["top"] + expected["evidence"], strict=True):
            for key in one.keys() & {"cosine", "logit", "score", "contribution"}:
                assert answer.pop(key) == pytest.approx(one.pop(key), abs=1e-5)
            assert answer == one

    def test_pictures_are_resized_as_pillow_does_it(self, site, visit):
        page = visit(site)
        for width, height in [(130, 211), (211, 130), (60, 40), (96, 300), (96, 96), (97, 95)]:
            pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
            resized = page.evaluate(RESIZE, [pixels.ravel().tolist(), width, height])
            expected = np.asarray(Image.fromarray(pixels).resize((96, 96), Image.Resampling.BILINEAR))
            # older ones never take the columns first
            if int(PIL.__version__.split(".")[0]) >= 13 or height <= width:
                assert resized == expected.ravel().tolist()

    def test_slots_are_switched_off_in_closed_form(self, site, visit):
        page = visit(site, width=360)
        page.locator("#examples button").first.click()
        expect(page.locator("#status")).to_contain_text("Answered")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if AXE.is_file():
            assert find_violations(page) == []
        record = json.loads(page.locator("#record").text_content())
        first = record["evidence"][0]
        page.locator(f"[data-switch='{first['channel']}']").focus()
        page.keyboard.press("Space")
        expect(page.locator("#permanent")).to_contain_text("opal-deploy edit exact.onnx --drop")
        shown = page.locator("#classes section", has_text=record["prediction"]["label"]).locator("p").inner_text()
        left = [slot["score"] for slot in record["evidence"][1:]]
        # the norm of all scores but this one's: contribution = score / norm / sqrt(m)
        norm = first["score"] / first["contribution"] / np.sqrt(3)
        expected = sum(left) / np.sqrt(norm**2 - first["score"] ** 2) / np.sqrt(2)
        assert float(shown.removeprefix("cosine ")) == pytest.approx(expected, abs=1e-3)
        page.keyboard.press("Space")
        expect(page.locator("#permanent")).to_be_hidden()

    def test_a_covered_picture_is_asked_again(self, site, visit):
        page = visit(site)
        page.locator("#examples button").first.click()
        expect(page.locator("#status")).to_contain_text("Answered")
        page.locator("#brush").check()
        page.locator("#picture").click(position={"x": 100, "y": 100})
        expect(page.locator("#status")).to_contain_text("Covered: ")
        page.locator("#uncover").click()
        expect(page.locator("#status")).to_contain_text("Answered")
        score = json.loads(page.locator("#record").text_content())["evidence"][0]["score"]
        page.locator("#cover").click()
        expect(page.locator("#status")).to_contain_text("Covered: ")
        assert json.loads(page.locator("#record").text_content())["evidence"][0]["score"] != score

    def test_the_camera_takes_a_picture(self, site, visit):
        page = visit(site)
        page.locator("#camera").click()
        expect(page.locator("#shoot")).to_be_visible()
        expect(page.locator("#video")).to_have_js_property("readyState", 4)
        page.locator("#shoot").click()
        expect(page.locator("#status")).to_contain_text("Answered")
        assert json.loads(page.locator("#record").text_content())["image"] == "camera.png"
        expect(page.locator("#viewfinder")).to_be_hidden()

    def test_a_page_of_an_earlier_version_answers_as_it_did(self, site, visit, tmp_path):
        for version in (GOLDEN / "0.1.0",):
            folder = tmp_path / version.name
            shutil.copytree(version / "page", folder)
            shutil.copytree(site / "ort", folder / "ort")
            page = visit(folder)
            expect(page.locator("#checked")).to_contain_text("cells as in PyTorch")
            record = ask(page, version / "images/0.png")
            expected = json.loads((version / "model.onnx.jsonl").read_text("utf-8").splitlines()[0])
            assert record["prediction"]["label"] == expected["prediction"]["label"]
            assert [slot["cell"] for slot in record["evidence"]] == [slot["cell"] for slot in expected["evidence"]]

    def test_patches_a_margin_and_webgpu(self, site, exact_model, visit, make_pictures, tmp_path):
        make_pictures(tmp_path / "photos", 12)
        atlas = create_atlas(
            tmp_path / "photos", model=exact_model, out=tmp_path / "atlas", plain=True, threads=1
        ).atlas
        options = {"atlas": tmp_path / "atlas", "min_margin": 2.0, "webgpu": True}
        folder = tmp_path / "site"
        opal_deploy.export_web(exact_model, folder, ort_web=ORT_WEB, threads=1, log=lambda text: None, **options)
        page = visit(folder)
        expect(page.locator("#checked")).to_contain_text("on this device (WebGPU)")
        record = ask(page, next((tmp_path / "photos").iterdir()))
        assert record["status"] == "abstained"
        expect(page.locator("#flag")).to_have_text("Not sure: the margin is below 2.000")
        shown = page.locator(f"tr[data-channel='{record['evidence'][0]['channel']}'] .patches img")
        expect(shown).to_have_count(len(atlas.patches(record["prediction"]["class_id"], 0)[:3]))
        assert shown.first.evaluate("image => image.decode().then(() => image.naturalWidth > 0)")
        # where WebGPU fails or answers wrong, WebAssembly answers
        (folder / "ort/ort-wasm-simd-threaded.asyncify.wasm").write_bytes(b"")
        page = visit(folder)
        expect(page.locator("#checked")).to_contain_text(re.compile(r"WebAssembly, 1 thread; WebGPU: "))

    def test_a_damaged_model_answers_nothing_and_a_text_is_no_picture(self, site, visit, tmp_path):
        (tmp_path / "note.jpg").write_text("no picture")
        page = visit(site)
        page.locator("#file").set_input_files(tmp_path / "note.jpg")
        expect(page.locator("#status.alert")).to_have_text(re.compile("note.jpg: not a picture"))
        damaged = shutil.copytree(site, tmp_path / "damaged")
        with (damaged / "model.onnx").open("r+b") as stream:
            stream.seek(-1000, 2)
            byte = stream.read(1)
            stream.seek(-1, 1)
            stream.write(bytes([byte[0] ^ 1]))
        page = visit(damaged)
        expect(page.locator("#status.alert")).to_contain_text("model.onnx is damaged")
        expect(page.locator("#file")).to_be_disabled()


@needs_ort_web
def test_only_a_site_of_ours_is_replaced_and_only_when_asked(site, exact_model, opal, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years")
    options = ("--ort-web", ORT_WEB, "--threads", "1")
    done = opal("export", exact_model, "--web", other, *options, "--overwrite")
    assert (done.returncode, [path.name for path in other.iterdir()]) == (2, ["thesis.txt"])
    assert "holds other files; give a new or an empty folder" in done.stderr
    assert "replace it with --overwrite" in opal("export", exact_model, "--web", site, *options).stderr
    assert opal("export", exact_model, "--web", site, *options, "--overwrite").returncode == 0


@needs_ort_web
def test_what_a_page_cannot_do_is_refused_in_one_line(exact_model, opal, tmp_path):
    other = Path(shutil.copy(exact_model, tmp_path / "other.onnx"))
    onnx_file.rewrite_metadata(other, replace(onnx_file.read_metadata(other), precision="fp16"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "ort").mkdir()
    shutil.copy(ORT_WEB / "dist/ort.wasm.bundle.min.mjs", tmp_path / "ort")
    for arguments, message in [
        ((other, "--web", "site", "--ort-web", ORT_WEB), "--web needs a model with precision fp32"),
        ((exact_model, "--web", "site"), "npm install onnxruntime-web@1.30.0, then give --ort-web"),
        ((exact_model, "--web", "site", "--ort-web", tmp_path / "ort"), "no ort-wasm-simd-threaded.wasm"),
        ((exact_model, "--web", "site", "--ort-web", ORT_WEB, "--examples", tmp_path / "empty"), "no pictures there"),
        ((exact_model, "--web", "site", "--ort-web", ORT_WEB, "--triton", "models"), "leave out --trt and --triton"),
        ((exact_model, "--web", "site", "--ort-web", ORT_WEB, "--outputs", "topk"), "uint8 input and all outputs"),
        ((exact_model, "--examples", tmp_path / "empty", "--webgpu"), "--webgpu: only for a site; add --web"),
        ((exact_model, "--web", "site", "--ort-web", ORT_WEB, "--min-margin", "x%"), "--min-margin"),
        ((exact_model, "--web", "site", "--ort-web", ORT_WEB, "--atlas", tmp_path / "empty"), "build one with"),
    ]:
        done = opal("export", *arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr.splitlines()[-1]
        assert not (tmp_path / "site").exists()
