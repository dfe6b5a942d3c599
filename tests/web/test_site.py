"""The site for browsers: what is written, and what a real browser answers."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image, ImageCms
from playwright.sync_api import expect

import opal_deploy
from opal_deploy.artifact import onnx_file
from opal_deploy.auditing.record_diff import Tolerance, diff_records
from opal_deploy.errors import UsageError
from opal_deploy.preprocess import resize
from opal_deploy.records.lines import to_document
from opal_deploy.records.record import to_record
from opal_deploy.synthetic import example_images
from tests.browser import AXE, ORT_WEB, find_violations, needs_chromium, needs_ort_web, open_browser, serve_folders
from tests.builders import make_patches
from tests.cli.calls import check
from tests.export.test_classifier import TAILS, make
from tests.export.test_other_heads import Theirs
from tests.records.test_schema import validator

GOLDEN = Path(__file__).parents[1] / "golden"
# a GPU and a camera of software
FLAGS = (
    "--enable-unsafe-webgpu --use-webgpu-adapter=swiftshader --use-fake-device-for-media-stream "
    "--use-fake-ui-for-media-stream"
)
RESIZE = """async ([pixels, width, height, filter]) => {
  const { resize } = await import("/pixels.js");
  const bytes = Uint8Array.from(pixels, character => character.charCodeAt(0));
  return String.fromCharCode(...resize(bytes, width, height, 96, 96, filter));
}"""


@pytest.fixture(scope="module")
def site(exact_model, tmp_path_factory):
    """The folder of a site."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "pictures").mkdir()
    for number, pixels in enumerate(example_images(3, 130, 211)):
        Image.fromarray(pixels).save(folder / f"pictures/{number}.png")
    options = {"ort_web": ORT_WEB, "examples": folder / "pictures", "threads": 1, "log": lambda text: None}
    opal_deploy.export_web(exact_model, folder / "site", **options)
    return folder / "site"


@pytest.fixture(scope="module")
def visit():
    """Open a folder in a browser, as from a server; fails if the page asks another one."""
    with open_browser(*FLAGS.split()) as browser:
        elsewhere = []
        expect.set_options(timeout=60_000)

        def open_page(folder, width=1280, **options):
            page = browser.new_page(viewport={"width": width, "height": 800}, **options)
            page.set_default_timeout(60_000)
            page.on("pageerror", lambda error: elsewhere.append(str(error)))
            page.on("request", lambda request: elsewhere.append(request.url))
            serve_folders(page, folder)
            page.goto("http://localhost/")
            page.wait_for_selector("html[data-ready], #status.alert")
            return page

        yield open_page
        assert [url for url in elsewhere if not url.startswith(("http://localhost/", "blob:", "data:", "file:"))] == []
        expect.set_options(timeout=5_000)


@pytest.fixture(autouse=True)
def _pillow_resizes(monkeypatch):
    """The page's pixels are Pillow's; those of the faster library may differ by 1."""
    monkeypatch.setattr(resize, "cykooz_resizer", None)


@pytest.fixture(scope="module")
def page(site, visit):
    return visit(site)


def ask(page, path):
    """Return the record that the page shows for a picture."""
    page.locator("#file").set_input_files(path)
    expect(page.locator("#status")).to_contain_text(re.compile("Answered|No answer|not a picture"))
    expect(page.locator("#record")).to_contain_text(f'"{path.name}"')
    return json.loads(page.locator("#record").text_content())


@needs_ort_web
@pytest.mark.browser
@needs_chromium
class TestPage:
    @pytest.mark.parametrize(("mode", "suffix"), [("L", "png"), ("RGBA", "png"), ("RGB", "jpg")])
    def test_a_picture_has_the_record_that_infer_writes(self, page, model, tmp_path, mode, suffix):
        expect(page.locator("#checked")).to_contain_text("cells as in PyTorch")
        (pixels,) = example_images(1, 130, 211)
        picture = Image.fromarray(pixels).convert(mode)
        if mode == "RGBA":
            # wholly transparent or not at all: what lies between is rounded differently
            picture.putalpha(Image.fromarray(np.where(pixels[..., 0] > 100, 255, 0).astype(np.uint8)))
        path = tmp_path / f"{mode}.{suffix}"
        # which neither applies
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
        picture.save(path, icc_profile=profile, quality=95, subsampling=0)
        record = ask(page, path)
        expected = model.predict(path)
        assert record.keys() == {*expected, "image_sha256", "model_sha256"}
        validator(strict=True).validate(record)
        assert to_document(to_record(record)).keys() == record.keys()
        for answer, one in zip(record["top"] + record["evidence"], expected["top"] + expected["evidence"], strict=True):
            for key in one.keys() & {"cosine", "logit", "score", "contribution"}:
                assert answer.pop(key) == pytest.approx(one.pop(key), abs=1e-5)
            assert answer == one

    @pytest.mark.slow
    def test_shared_prototypes_are_answered_listed_and_switched_off(self, visit, tmp_path, opal):
        Theirs("pip").save_cabrnet(tmp_path)
        arguments = ("--arch", "model_arch.yml", "--size", "96", "--threads", "1")
        check(opal("export", "model_state.pth", *arguments, cwd=tmp_path))
        model, path = tmp_path / "model_state.onnx", tmp_path / "picture.png"
        opal_deploy.export_web(model, tmp_path / "site", ort_web=ORT_WEB, threads=1, log=lambda text: None)
        Image.fromarray(example_images(1, 96, 96)[0]).save(path)
        page = visit(tmp_path / "site")
        expect(page.locator("#checked")).to_contain_text("cells as in PyTorch")
        record, expected = ask(page, path), opal_deploy.load(model, device="cpu", threads=1).predict(path)
        validator(strict=True).validate(record)
        assert [slot["channel"] for slot in record["evidence"]] == [slot["channel"] for slot in expected["evidence"]]
        assert [slot["cell"] for slot in record["evidence"]] == [list(slot["cell"]) for slot in expected["evidence"]]
        for name in ("margin", "rest", "bias"):
            assert record[name] == pytest.approx(expected[name], abs=1e-5), name
        assert record["prediction"]["cosine"] is None
        expect(page.locator("#figures")).to_contain_text("The parts listed add")
        strongest = record["evidence"][0]["channel"]
        page.locator(f'[data-switch="{strongest}"]').first.click()
        expect(page.locator("#command")).to_contain_text(f"--drop {strongest}")

    @pytest.mark.parametrize(("tail", "preprocess"), [("sigmoid", "timm"), ("dense", "letterbox")])
    def test_a_classifier_is_explained_as_it_is(self, visit, opal, tmp_path, tail, preprocess):
        path = tmp_path / "picture.png"
        Image.fromarray(example_images(2, 331, 477)[1]).save(path)
        options = ("--preprocess", preprocess, "--web", "site", "--ort-web", ORT_WEB, "--threads", "1")
        check(opal("export", make(tmp_path / "c.onnx", TAILS[tail][0]), *options, cwd=tmp_path))
        page = visit(tmp_path / "site")
        expect(page.locator("#checked")).to_contain_text("the cells' shares add up to them")
        record = ask(page, path)
        expected = to_document(opal_deploy.load(tmp_path / "c.opal.onnx", threads=1).predict(path).answered)
        validator(strict=True).validate(record)
        assert ("labels" in record) == (tail == "sigmoid")
        tolerance = Tolerance(cosine=1e-5, logit=1e-5, score=1e-5)
        assert list(map(str, diff_records(record, {**record, **expected}, tolerance))) == []
        page.locator("#classes section").last.hover()
        painted = "heat => heat.getContext('2d').getImageData(0, 0, 4, 4).data.some(Boolean)"
        assert page.locator("#heat").evaluate(painted)
        # the report and the overlay show further labels too
        check(opal("infer", path, "--explain", "--out", "run", "--threads", "1", cwd=tmp_path))
        labels, (overlay,) = expected.get("labels", [])[1:], (tmp_path / "run" / "overlays").iterdir()
        plain = opal_deploy.load(tmp_path / "c.opal.onnx", threads=1).predict(path).overlay()
        with Image.open(overlay) as shown:
            assert (shown.height > plain.height) == (tail == "sigmoid")
        page.goto((tmp_path / "run" / "report.html").as_uri())
        page.locator("#cards h3 a").click()
        headings = ["Regions", *(label["label"] for label in labels), "Closest classes"]
        expect(page.locator("#sheet h3")).to_have_text(headings)
        for row in page.locator("#sheet tr[data-channel]").all()[:1]:
            row.hover()
            expect(page.locator("#sheet .box.other.lit")).to_be_visible()

    def test_pictures_are_resized_as_pillow_does_it(self, page):
        sizes = [(130, 211), (211, 130), (60, 40), (96, 300), (96, 96), (97, 95)]
        for (width, height), kind in itertools.product(sizes, ("bilinear", "bicubic")):
            pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
            resized = page.evaluate(RESIZE, [pixels.tobytes().decode("latin-1"), width, height, kind])
            expected = np.asarray(Image.fromarray(pixels).resize((96, 96), Image.Resampling[kind.upper()]))
            # older ones never take the columns first
            if int(PIL.__version__.split(".")[0]) >= 13 or height <= width:
                assert resized.encode("latin-1") == expected.tobytes()

    @pytest.mark.slow
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
        # the numbers are those of `test_class_map_script`
        assert float(shown.removeprefix("cosine ")) != pytest.approx(record["prediction"]["cosine"], abs=1e-3)
        page.keyboard.press("Space")
        expect(page.locator("#permanent")).to_be_hidden()

    @pytest.mark.slow
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

    @pytest.mark.slow
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
        version, folder = GOLDEN / "0.1.0", tmp_path / "page"
        shutil.copytree(version / "page", folder)
        shutil.copytree(site / "ort", folder / "ort")
        record = ask(visit(folder), version / "images/0.png")
        expected = json.loads((version / "model.onnx.jsonl").read_text("utf-8").splitlines()[0])
        assert record["prediction"]["label"] == expected["prediction"]["label"]
        assert [slot["cell"] for slot in record["evidence"]] == [slot["cell"] for slot in expected["evidence"]]

    @pytest.mark.slow
    def test_patches_a_margin_and_webgpu(self, site, exact_model, visit, make_pictures, tmp_path):
        make_pictures(tmp_path / "photos", 12)
        folder, model = tmp_path / "site", tmp_path / "with_patches.onnx"
        shutil.copy(exact_model, model)
        metadata = onnx_file.read_metadata(model)
        onnx_file.rewrite_metadata(model, replace(metadata, patches=make_patches(4, 3)))
        opal_deploy.export_web(
            model, folder, ort_web=ORT_WEB, threads=1, log=lambda text: None, min_margin=2.0, webgpu=True
        )
        page = visit(folder)
        expect(page.locator("#checked")).to_contain_text("on this device (WebGPU)")
        record = ask(page, next((tmp_path / "photos").iterdir()))
        assert record["status"] == "abstained"
        expect(page.locator("#flag")).to_have_text("Not sure: the margin is below 2.000")
        row = page.locator(f"tr[data-channel='{record['evidence'][0]['channel']}'] .patches")
        # what the slot found in the picture, and two training images
        expect(row.locator("> .patch")).to_have_count(3)
        shown = row.locator("img")
        assert shown.first.evaluate("image => image.decode().then(() => image.naturalWidth > 0)")
        # where WebGPU fails or answers wrong, WebAssembly answers
        (folder / "ort/ort-wasm-simd-threaded.asyncify.wasm").write_bytes(b"")
        page = visit(folder)
        expect(page.locator("#checked")).to_contain_text(re.compile(r"WebAssembly, 1 thread; WebGPU: "))

    @pytest.mark.slow
    def test_a_crop_has_the_record_that_infer_writes_and_is_set_by_mouse_and_keys(self, site, model, visit, tmp_path):
        page = visit(site, width=360)
        path = tmp_path / "picture.png"
        Image.fromarray(example_images(1, 130, 211)[0]).save(path)
        ask(page, path)
        page.locator("#crop").check()
        photo, frame = page.locator(".photo"), page.locator(".crop")
        photo.scroll_into_view_if_needed()
        area = photo.bounding_box()

        def at(x, y):
            return area["x"] + x * area["width"], area["y"] + y * area["height"]

        def crop():
            expect(page.locator("#status")).to_contain_text("This part: ")
            width, height, x, y = map(int, re.findall(r"\d+", frame.get_attribute("aria-label").partition(". ")[0]))
            return x, y, x + width, y + height

        page.mouse.move(*at(0.25, 0.2))
        page.mouse.down()
        page.mouse.move(*at(0.75, 0.8), steps=4)
        page.mouse.up()
        drawn = crop()
        assert drawn == pytest.approx((53, 26, 158, 104), abs=2)
        record = json.loads(page.locator("#record").text_content())
        expected = model.predict(path, boxes=drawn)
        assert record["prediction"]["cosine"] == pytest.approx(expected["prediction"]["cosine"], abs=1e-5)
        assert [slot["box"] for slot in record["evidence"]] == [slot["box"] for slot in expected["evidence"]]
        frame.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Shift+ArrowDown")
        moved = crop()
        assert (moved[0], moved[1], moved[3]) == pytest.approx((drawn[0] - 2, drawn[1], drawn[3] + 1), abs=1)
        page.keyboard.press("Escape")
        if AXE.is_file():
            assert find_violations(page) == []

    @pytest.mark.slow
    def test_of_many_files_each_is_answered_or_refused_with_its_reason(self, site, visit, tmp_path):
        (tmp_path / "note.jpg").write_text("no picture")
        Image.new("1", (20_000, 20_000)).save(tmp_path / "large.png")
        for number, pixels in enumerate(example_images(3, 96, 96)):
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        page = visit(site)
        page.locator("#file").set_input_files([tmp_path / name for name in ("note.jpg", "large.png", "0.png", "1.png")])
        expect(page.locator("#counted")).to_have_text("2 of 4 pictures answered, 2 refused")
        # the first was to be shown, and the reason stays while others are answered
        expect(page.locator("#status.alert")).to_contain_text("note.jpg: not a picture")
        buttons = page.locator("#queue button")
        expect(buttons.nth(1)).to_contain_text("20000 x 20000 pixels; this page takes up to 50 megapixels")
        page.locator("#file").set_input_files(tmp_path / "2.png")
        expect(page.locator("#status")).to_contain_text("Answered")
        expect(page.locator("#counted")).to_have_text("3 of 5 pictures answered, 2 refused")
        buttons.nth(2).click()
        expect(buttons.nth(2)).to_have_attribute("aria-current", "")
        assert json.loads(page.locator("#record").text_content())["image"] == "0.png"

    def test_a_damaged_site_answers_nothing_and_says_so(self, site, visit, tmp_path):
        whole, model = ((site / name).read_bytes() for name in ("model.json", "model.onnx"))
        other = json.loads(whole)
        other["class_map"]["dropped"] = [0]
        changed = (whole[: len(whole) // 2], json.dumps(other).encode(), model[:-1000] + b"?" + model[-999:])
        for number, (name, content) in enumerate(zip(("model.json", "model.json", "model.onnx"), changed, strict=True)):
            damaged = shutil.copytree(site, tmp_path / str(number))
            (damaged / name).write_bytes(content)
            page = visit(damaged)
            expect(page.locator("#status.alert")).to_contain_text(f"{name} is damaged")
            expect(page.locator("#file")).to_be_disabled()
        names = json.loads(onnx_file.read_header(site / "model.onnx").properties["opal"])["class_names"]
        assert all(name.encode() not in whole for name in names), "class names come from model.onnx, which is checked"


def _write(model, folder, **options):
    opal_deploy.export_web(model, folder, ort_web=ORT_WEB, threads=1, verify=False, log=lambda text: None, **options)
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@needs_ort_web
def test_only_files_that_a_site_lists_are_replaced(site, exact_model, make_pictures, tmp_path):
    make_pictures(tmp_path / "photos", 2)
    folder = tmp_path / "site"
    before = _write(exact_model, folder, examples=tmp_path / "photos")
    (folder / ".git").mkdir()
    for name in ("notes.txt", ".git/HEAD", "examples/mine.jpg"):
        (folder / name).write_text("years")
    (folder / "site.css").write_text("changed")
    with pytest.raises(UsageError, match="the site exists; pass --overwrite to replace it"):
        _write(exact_model, folder)
    after = _write(exact_model, folder, overwrite=True)
    assert after - before == {"notes.txt", ".git/HEAD", "examples/mine.jpg"}
    assert before - after == {"examples/1.jpg", "examples/2.jpg"}
    assert (folder / "site.css").read_bytes() == (site / "site.css").read_bytes()
    assert sorted(json.loads((folder / "model.json").read_text("utf-8"))["files"]) == sorted(after - (after - before))
    (folder / "examples/1.jpg").write_text("mine, too")
    with pytest.raises(UsageError, match=r"examples/1.jpg: not of the site, which needs its name"):
        _write(exact_model, folder, examples=tmp_path / "photos", overwrite=True)


@needs_ort_web
def test_a_folder_that_is_no_site_is_refused(exact_model, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for name, text, message in [
        ("thesis.txt", "years", "no site's"),
        ("model.json", '{"kind": "opal-web"}', "no site's"),
        ("model.json", '{"kind": "opal-web", "files": ["../thesis.txt"]}', "no site's"),
    ]:
        (folder / name).write_text(text)
        with pytest.raises(UsageError, match=message):
            _write(exact_model, folder, overwrite=True)
        assert (folder / name).read_text() == text
    for path in (tmp_path / ("n" * 256), Path("/dev/null/x")):
        with pytest.raises(UsageError, match="cannot be written"):
            _write(exact_model, path)


@needs_ort_web
def test_examples_are_of_each_class_in_turn_and_no_creatures_for_other_classes(exact_model, make_pictures, tmp_path):
    assert not any(file.startswith("examples/") for file in _write(exact_model, tmp_path / "none"))
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(7):
            Image.new("RGB", (32, 32), colour).save(tmp_path / f"photos/{name}/{number}.png")
    _write(exact_model, tmp_path / "site", examples=tmp_path / "photos")
    blue = [Image.open(tmp_path / f"site/examples/{number}.jpg").getpixel((0, 0))[2] > 128 for number in range(1, 7)]
    assert blue == [False, True] * 3
    creatures = Path(str(files("opal_deploy.cli.demo") / "creatures.onnx"))
    assert "examples/3.png" in _write(creatures, tmp_path / "creatures")


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
        ((exact_model, "--web", "site", "--ort-web", ORT_WEB, "--triton", "models"), "--triton"),
        ((exact_model, "--web", "site", "--ort-web", ORT_WEB, "--outputs", "topk"), "leave out --outputs"),
        ((exact_model, "--examples", tmp_path / "empty", "--webgpu"), "--webgpu"),
    ]:
        done = check(opal("export", *arguments, cwd=tmp_path), 2)
        assert message in done.stderr.splitlines()[-1]
        assert not (tmp_path / "site").exists()
