from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image

from opal_deploy.records.record import error_record
from opal_deploy.visualization.overlay import draw_overlay, encode_overlay
from opal_deploy.visualization.report import ReportWriter, choose_image_mode, make_thumbnail
from opal_deploy.visualization.report.page import read_asset, to_json

HOSTILE = "<script>alert(1)</script>\"'&\n\udcff</title><img src=x onerror=alert(2)>.jpg"
SIZE = (200, 200)


class Elements(HTMLParser):
    """Names of the elements, their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.scripts: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append(dict(attrs).get("id"))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture
def hostile_report(tmp_path: Path, make_record) -> Path:
    path = tmp_path / "report.html"
    record = make_record(SIZE, image=HOSTILE, labels=(HOSTILE, HOSTILE))
    with ReportWriter(path, title=HOSTILE, facts=[(HOSTILE, HOSTILE)]) as report:
        report.add(record, draw_overlay(Image.new("RGB", SIZE), record))
        report.add(error_record(HOSTILE, HOSTILE, HOSTILE), None)
        report.close([(HOSTILE, HOSTILE)])
    return path


def test_names_labels_and_messages_cannot_become_markup(hostile_report: Path) -> None:
    page = Elements(read(hostile_report))
    assert page.scripts == ["config", "index", "d0", None]
    assert page.names.count("img") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>\"'&\\n\\udcff</title>" in page.text


def policy_of(path: Path) -> str:
    page = Elements(read(path))
    (policy,) = [value for name, value in page.attributes if name == "content" and "default-src" in (value or "")]
    assert policy is not None
    return policy


def test_the_page_is_self_contained(hostile_report: Path) -> None:
    page = Elements(read(hostile_report))
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links
    assert all(link.startswith(("data:image/jpeg;base64,", "#")) for link in links)
    assert "url(" not in read(hostile_report)
    assert "@import" not in read(hostile_report)


@pytest.mark.parametrize(("image_mode", "sources"), [("embed", "data:"), ("files", "'self' file:")])
def test_the_policy_lets_in_one_script_and_its_styles_by_their_digests(
    tmp_path: Path, make_record, image_mode: Literal["embed", "files"], sources: str
) -> None:
    path = tmp_path / "report.html"
    with ReportWriter(path, title="Run", facts=[], image_mode=image_mode) as report:
        report.add(make_record(SIZE), Image.new("RGB", SIZE))
    page = read(path)

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = " ".join(map(digest, re.findall(r"<style>(.*?)</style>", page, re.DOTALL)))
    assert policy_of(path) == (
        f"default-src 'none'; img-src {sources}; script-src {digest(script)}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def test_the_script_makes_no_markup_and_runs_no_text() -> None:
    script = read_asset("script.js")
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
        "fetch(",
    ):
        assert name not in script, name


def test_nothing_from_outside_can_end_a_block_of_data() -> None:
    hostile = ["</script>", "<!--<script>", "]]>&lt;", "\u2028\ud800"]
    text = to_json(hostile)
    assert not set(text) & set("<>&\u2028")
    assert text.isascii()
    assert json.loads(text) == hostile


def test_pictures_have_alternative_texts_and_the_page_a_language(hostile_report: Path) -> None:
    page = Elements(read(hostile_report))
    assert ("lang", "en") in page.attributes
    assert any("with the evidence boxes; predicted" in (v or "") for n, v in page.attributes if n == "alt")
    assert page.names.count("h1") == 1


def test_counts_are_those_of_the_records(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    with ReportWriter(path, title="Run", facts=[("Model", "ckpt.onnx")]) as report:
        for _ in range(3):
            report.add(make_record(SIZE), None)
        report.add(make_record(SIZE, min_margin=1.5), None)
        report.add(error_record("x.jpg", "truncated_image", "cut short"), None)
        report.add(error_record("y.jpg", "truncated_image", "cut short too"), None)
        report.close([("Took", "2 s")])
    tiles = re.findall(r"<b>([\d,]+)</b><span>(\w+)</span>", read(path))
    assert tiles == [("6", "images"), ("3", "answered"), ("1", "abstained"), ("2", "failed")]
    text = Elements(read(path)).text
    assert "1 class in 4 answers" in text
    assert "truncated_image 2" in text
    assert "cut short too" in text
    assert text.index("About this run") < text.index("ckpt.onnx") < text.index("Took")


def test_only_the_first_images_are_shown_and_the_page_says_so(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    with ReportWriter(path, title="Run", facts=[], limit=2) as report:
        fullness = []
        for i in range(1500):
            fullness.append(report.full)
            report.add(make_record(SIZE, image=f"{i:04}.jpg"), None)
        for i in range(5):
            report.add(error_record(f"bad{i}.jpg", "truncated_image", "cut"), None)
    page = Elements(read(path))
    assert page.names.count("article") == 4, "two images, two failures"
    assert fullness[:3] == [False, False, True]
    assert "The first 2 of 1,500 answered images are shown; all are in results.jsonl." in page.text
    assert "The first 2 are listed; all are in results.jsonl." in page.text
    assert "bad2.jpg" not in page.text


def test_only_the_most_frequent_classes_are_listed(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    record = make_record(SIZE)
    with ReportWriter(path, title="Run", facts=[], limit=0) as report:
        for i in range(40):
            report.add({**record, "prediction": {**record["prediction"], "class_id": i, "label": f"kind {i}"}}, None)
    text = Elements(read(path)).text
    assert "kind 29" in text
    assert "kind 30" not in text
    assert "10 more classes not listed." in text


def test_memory_does_not_grow_with_the_run(tmp_path: Path, make_record) -> None:
    answered, failed = make_record(SIZE), error_record("x.jpg", "truncated_image", "y" * 10_000)
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[], limit=10) as report:
        for _ in range(20):
            report.add(answered, None)
            report.add(failed, None)
        tracemalloc.start()
        for _ in range(5000):
            report.add(answered, None)
            report.add(failed, None)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert grown < 50_000


@pytest.mark.parametrize("first", [0.9, 0.1], ids=["ever less certain", "ever more certain"])
def test_cards_wait_on_disk_not_in_memory(tmp_path: Path, make_record, first: float) -> None:
    record = make_record((480, 480))
    picture = make_thumbnail(Image.effect_noise((480, 480), 90).convert("RGB"), record)
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as report:
        report.add(record, picture)
        tracemalloc.start()
        for i in range(100):
            report.add({**record, "margin": abs(first - i / 1000)}, picture)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (tmp_path / "report.html").stat().st_size > 100 * 50_000
    assert grown < 400_000


def test_each_picture_is_in_the_file_once(tmp_path: Path, make_record) -> None:
    rng = random.Random(7)
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as report:
        for i in range(120):
            record = {**make_record((60, 40)), "margin": rng.random()}
            report.add(record, make_thumbnail(Image.new("RGB", (60, 40), (2 * i, 255 - 2 * i, i)), record))
    page = read(tmp_path / "report.html")
    written = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    kept = dict(re.findall(r'<script type="text/plain" id="p(\d+)">([^<]+)</script>', page))
    assert len(written) == 48
    assert len(kept) == 72
    assert len({*written, *kept.values()}) == 120
    shown = re.findall(r'<article id="i=(\d+)">', page)
    assert not set(shown) & set(kept)
    for number, encoded in [*kept.items(), *zip(shown, written, strict=True)]:
        red, _, blue = Image.open(io.BytesIO(base64.b64decode(encoded))).getpixel((5, 5))
        assert abs(red - 2 * int(number)) < 6
        assert abs(blue - int(number)) < 6


def test_the_least_certain_come_first(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    margins = [0.5, None, 0.1, 0.3, 0.1]
    with ReportWriter(path, title="Run", facts=[]) as report:
        report.add(error_record("x.jpg", "truncated_image", "cut"), None)
        for margin in margins:
            report.add({**make_record(SIZE), "margin": margin}, None)
    assert re.findall(r'<article id="i=(\d+)">', read(path)) == ["3", "5", "4", "1", "0", "2"]


def test_a_page_shows_drawings_of_the_runs_folder_and_nothing_else(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    names = ["overlays/000000-a.jpg", "overlays/0001/010000-a.jpg", "../b.jpg", "overlays/../../c.jpg", "file:///d.jpg"]
    with ReportWriter(path, title="Run", facts=[], image_mode="files") as report:
        assert not report.embeds_images
        for name in names:
            report.add({**make_record(SIZE), "overlay": name}, None)
    assert re.findall(r'<img [^>]*src="([^"]*)"', read(path)) == names[:2]
    assert "d.jpg" not in read(path)


@pytest.mark.parametrize(("count", "expected"), [(0, "embed"), (200, "embed"), (201, "files")])
def test_few_pictures_are_embedded(count: int, expected: str) -> None:
    assert choose_image_mode(count) == expected


def test_labels_are_set_against_classes(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    with ReportWriter(path, title="Run", facts=[]) as report:
        for truth, predicted in [("a", "a"), ("a", "a"), ("a", "b"), ("b", "b"), ("other", "b")]:
            record = make_record(SIZE, labels=(predicted, "z"))
            record["truth"] = truth
            report.add(record, None)
        report.add(make_record(SIZE), None)
    page = read(path)
    cells = re.findall(r'<td class="(\w+) s\d" data-truth="(\w+)" data-class="(\w+)">(\d+)</td>', page)
    assert cells == [
        ("agrees", "a", "a", "2"),
        ("differs", "a", "b", "1"),
        ("agrees", "b", "b", "1"),
        ("differs", "other", "b", "1"),
    ]
    assert "label for 3 of 5 answers with a label" in Elements(page).text


def test_many_classes_have_a_list_of_confusions(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    with ReportWriter(path, title="Run", facts=[], limit=0) as report:
        for i in range(100):
            for _ in range(1 + (i == 42)):
                record = make_record(SIZE, labels=(f"kind {i}", "z"))
                record["truth"] = f"kind {i + 1}"
                report.add(record, None)
    page = Elements(read(path))
    assert 'class="matrix"' not in read(path)
    rows = re.findall(r'data-truth="([^"]+)" data-class="([^"]+)">(\d+)<', read(path))
    assert rows[0] == ("kind 43", "kind 42", "2")
    assert len(rows) == 60
    assert "40 more pairs not listed." in page.text


def test_slots_have_the_names_that_somebody_gave_them(tmp_path: Path, make_record) -> None:
    record = make_record(SIZE)
    record["evidence"][1]["name"] = "beak"
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as report:
        report.add(record, None)
    page = read(tmp_path / "report.html")
    assert "<bdi>beak</bdi>" in page
    assert '"beak"' in page


def test_a_run_without_labels_has_no_filter_for_them(tmp_path: Path, make_record) -> None:
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as report:
        report.add(make_record(SIZE), None)
    page = read(tmp_path / "report.html")
    assert "<label hidden>Label" in page
    assert "Labels and classes" not in page


def test_an_exception_leaves_nothing_and_the_earlier_report_alone(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def fail() -> None:
        with ReportWriter(path, title="Run", facts=[]) as report:
            report.add(make_record(SIZE), None)
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        fail()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"report.html": "earlier"}


def test_nothing_appears_under_the_final_name_before_the_end(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    report = ReportWriter(path, title="Run", facts=[])
    report.add(make_record(SIZE), None)
    assert not path.exists()
    report.close()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_closed_report_takes_no_more(tmp_path: Path, make_record) -> None:
    report = ReportWriter(tmp_path / "report.html", title="Run", facts=[])
    report.close()
    with pytest.raises(ValueError, match="closed already"):
        report.add(make_record(SIZE), None)
    with pytest.raises(ValueError, match="closed already"):
        report.close()


def test_a_report_of_no_images_is_a_page(tmp_path: Path) -> None:
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]):
        pass
    assert "No image has an answer." in Elements(read(tmp_path / "report.html")).text


def test_a_model_without_evidence_has_cards_that_say_so(tmp_path: Path, answer_without_evidence) -> None:
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as report:
        report.add(answer_without_evidence, draw_overlay(Image.new("RGB", SIZE), answer_without_evidence))
    text = Elements(read(tmp_path / "report.html")).text
    assert "This model has no exact evidence" in text
    assert "logit" in text


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1000, 500), (480, 240)), ((300, 200), (300, 200)), ((400, 1280), (200, 640)), ((5000, 4000), (480, 384))],
)
@pytest.mark.parametrize("encoded", [True, False])
def test_a_thumbnail_is_the_photograph_alone(make_record, size, expected, encoded: bool) -> None:
    record = make_record(size, [(0, 0)])
    image = Image.new("RGB", size, (10, 20, 120))
    overlay = encode_overlay(image, record) if encoded else draw_overlay(image, record)
    small = Image.open(io.BytesIO(make_thumbnail(overlay, record)))
    assert small.size == expected
    # the last row and column are still the photograph, not the legend's paper
    for place in ((expected[0] - 1, 0), (expected[0] - 1, expected[1] - 1), (0, expected[1] - 1)):
        assert max(abs(a - b) for a, b in zip(small.getpixel(place), (10, 20, 120), strict=True)) < 25
