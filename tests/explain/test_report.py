from __future__ import annotations

import io
import re
import shutil
import subprocess
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from opal_deploy.explain.overlay import draw_overlay, encode_overlay
from opal_deploy.explain.records import error_record
from opal_deploy.explain.report import ReportWriter, thumbnail

HOSTILE = "<script>alert(1)</script>\"'&\n\udcff</title><img src=x onerror=alert(2)>.jpg"
SIZE = (200, 200)


class Elements(HTMLParser):
    """Names of the elements, their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

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
    assert "script" not in page.names
    assert page.names.count("img") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>\"'&\\n\\udcff</title>" in page.text


def test_the_page_is_self_contained(hostile_report: Path) -> None:
    page = Elements(read(hostile_report))
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links
    assert all(link.startswith("data:image/jpeg;base64,") for link in links)
    assert "url(" not in read(hostile_report)
    assert "@import" not in read(hostile_report)
    policy = dict(a for a in page.attributes if a[0] == "content" and "default-src" in (a[1] or ""))
    assert policy["content"].startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")


def test_pictures_have_alternative_texts_and_the_page_a_language(hostile_report: Path) -> None:
    page = Elements(read(hostile_report))
    assert ("lang", "en") in page.attributes
    assert any("with the evidence boxes; predicted" in (v or "") for n, v in page.attributes if n == "alt")
    assert page.names.count("h1") == 1


@pytest.mark.browser
def test_a_real_browser_finds_title_and_heading_and_no_script(hostile_report: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    run = subprocess.run(
        [chromium, *flags.split(), "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", hostile_report.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    page = Elements(run.stdout.decode())
    assert {"title", "h1", "article", "table"} <= set(page.names)
    assert "script" not in page.names
    assert page.names.count("img") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]


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
    assert text.index("ckpt.onnx") < text.index("2 s") < text.index("How to read this")


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
    assert page.names.count("article") == 2
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


def test_cards_wait_on_disk_not_in_memory(tmp_path: Path, make_record) -> None:
    record = make_record((480, 480))
    picture = encode_overlay(Image.effect_noise((480, 480), 90).convert("RGB"), record)
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as report:
        report.add(record, picture)
        tracemalloc.start()
        for _ in range(20):
            report.add(record, picture)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (tmp_path / "report.html").stat().st_size > 20 * 50_000
    assert grown < 100_000


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
    small = Image.open(io.BytesIO(thumbnail(overlay, record)))
    assert small.size == expected
    # the last row and column are still the photograph, not the legend's paper
    for place in ((expected[0] - 1, 0), (expected[0] - 1, expected[1] - 1), (0, expected[1] - 1)):
        assert max(abs(a - b) for a, b in zip(small.getpixel(place), (10, 20, 120), strict=True)) < 25
