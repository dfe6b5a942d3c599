from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from opal_deploy.records.record import error_record
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
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


Page = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Page:
    """Writes a report of (record, overlay) pairs or of records alone, and returns the page."""

    def write(records: Iterable[Any], summary: Sequence[Any] = (), **options: Any) -> str:
        with ReportWriter(tmp_path / "report.html", **{"title": "Run", "facts": [], **options}) as report:
            for entry in records:
                report.add(*(entry if isinstance(entry, tuple) else (entry, None)))
            report.close(summary)
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


@pytest.fixture
def hostile_page(write: Page, make_record) -> str:
    record = make_record(SIZE, image=HOSTILE, labels=(HOSTILE, HOSTILE))
    records = [(record, draw_overlay(Image.new("RGB", SIZE), record)), error_record(HOSTILE, HOSTILE, HOSTILE)]
    return write(records, [(HOSTILE, HOSTILE)], title=HOSTILE, facts=[(HOSTILE, HOSTILE)])


def test_names_labels_and_messages_cannot_become_markup(hostile_page: str) -> None:
    page = Elements(hostile_page)
    assert page.scripts == ["config", "index", "d0", None]
    assert page.names.count("img") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>\"'&\\n\\udcff</title>" in page.text


def test_the_page_is_self_contained_and_accessible(hostile_page: str) -> None:
    page = Elements(hostile_page)
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links
    assert all(link.startswith(("data:image/jpeg;base64,", "#")) for link in links)
    assert "url(" not in hostile_page
    assert "@import" not in hostile_page
    assert ("lang", "en") in page.attributes
    assert any("with the evidence boxes; predicted" in (v or "") for n, v in page.attributes if n == "alt")
    assert page.names.count("h1") == 1


@pytest.mark.parametrize(("image_mode", "sources"), [("embed", "data:"), ("files", "'self' file:")])
def test_the_policy_lets_in_one_script_and_its_styles_by_their_digests(
    write: Page, make_record, image_mode: str, sources: str
) -> None:
    page = write([(make_record(SIZE), Image.new("RGB", SIZE))], image_mode=image_mode)

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = " ".join(map(digest, re.findall(r"<style>(.*?)</style>", page, re.DOTALL)))
    (policy,) = [v for n, v in Elements(page).attributes if n == "content" and "default-src" in (v or "")]
    assert policy == (
        f"default-src 'none'; img-src {sources}; script-src {digest(script)}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def test_the_script_makes_no_markup_and_runs_no_text() -> None:
    forbidden = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( srcdoc fetch("
    script = read_asset("script.js")
    assert [name for name in forbidden.split() if name in script] == []


def test_nothing_from_outside_can_end_a_block_of_data() -> None:
    hostile = ["</script>", "<!--<script>", "]]>&lt;", "\u2028\ud800"]
    text = to_json(hostile)
    assert not set(text) & set("<>&\u2028")
    assert text.isascii()
    assert json.loads(text) == hostile


def test_counts_are_those_of_the_records(write: Page, make_record) -> None:
    failed = [error_record(f"{name}.jpg", "truncated_image", "cut short " + name) for name in ("x", "y")]
    records = [*[make_record(SIZE)] * 3, make_record(SIZE, min_margin=1.5), *failed]
    page = write(records, [("Took", "2 s")], facts=[("Model", "ckpt.onnx")])
    tiles = re.findall(r"<b>([\d,]+)</b><span>(\w+)</span>", page)
    assert tiles == [("6", "images"), ("3", "answered"), ("1", "abstained"), ("2", "failed")]
    text = Elements(page).text
    assert "1 class in 4 answers" in text
    assert "truncated_image 2" in text
    assert "cut short y" in text
    assert text.index("About this run") < text.index("ckpt.onnx") < text.index("Took")


def test_only_the_first_images_are_shown_and_the_page_says_so(tmp_path: Path, make_record) -> None:
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[], limit=2) as report:
        fullness = []
        for i in range(1500):
            fullness.append(report.full)
            report.add(make_record(SIZE, image=f"{i:04}.jpg"), None)
        for i in range(5):
            report.add(error_record(f"bad{i}.jpg", "truncated_image", "cut"), None)
    page = Elements((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.names.count("article") == 4, "two images, two failures"
    assert fullness[:3] == [False, False, True]
    assert "The first 2 of 1,500 answered images are shown; all are in results.jsonl." in page.text
    assert "The first 2 are listed; all are in results.jsonl." in page.text
    assert "bad2.jpg" not in page.text


def test_only_the_most_frequent_classes_are_listed(write: Page, make_record) -> None:
    record = make_record(SIZE)
    classes = [{**record["prediction"], "class_id": i, "label": f"kind {i}"} for i in range(40)]
    text = Elements(write([{**record, "prediction": each} for each in classes], limit=0)).text
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
    thumbnail = make_thumbnail(Image.effect_noise((480, 480), 90).convert("RGB"), record)
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as report:
        report.add(record, thumbnail)
        tracemalloc.start()
        for i in range(100):
            report.add({**record, "margin": abs(first - i / 1000)}, thumbnail)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (tmp_path / "report.html").stat().st_size > 100 * 50_000
    assert grown < 400_000


def test_each_image_is_in_the_file_once(write: Page, make_record) -> None:
    rng = random.Random(7)

    def entry(i: int) -> tuple[Any, bytes]:
        record = {**make_record((60, 40)), "margin": rng.random()}
        return record, make_thumbnail(Image.new("RGB", (60, 40), (2 * i, 255 - 2 * i, i)), record)

    page = write(map(entry, range(120)))
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


def test_the_least_certain_come_first(write: Page, make_record) -> None:
    records = [{**make_record(SIZE), "margin": margin} for margin in (0.5, None, 0.1, 0.3, 0.1)]
    page = write([error_record("x.jpg", "truncated_image", "cut"), *records])
    assert re.findall(r'<article id="i=(\d+)">', page) == ["3", "5", "4", "1", "0", "2"]


def test_a_page_shows_drawings_of_the_runs_folder_and_nothing_else(write: Page, make_record) -> None:
    names = ["overlays/000000-a.jpg", "overlays/0001/010000-a.jpg", "../b.jpg", "overlays/../../c.jpg", "file:///d.jpg"]
    page = write([{**make_record(SIZE), "overlay": name} for name in names], image_mode="files")
    assert re.findall(r'<img [^>]*src="([^"]*)"', page) == names[:2]
    assert "d.jpg" not in page


@pytest.mark.parametrize(("count", "expected"), [(0, "embed"), (200, "embed"), (201, "files")])
def test_few_images_are_embedded(tmp_path: Path, count: int, expected: Literal["embed", "files"]) -> None:
    assert choose_image_mode(count) == expected
    with ReportWriter(tmp_path / "report.html", title="", facts=[], image_mode=expected) as report:
        assert report.embeds_images == (expected == "embed")


def test_labels_are_set_against_classes(write: Page, make_record) -> None:
    pairs = [("a", "a"), ("a", "a"), ("a", "b"), ("b", "b"), ("other", "b")]
    records = [{**make_record(SIZE, labels=(predicted, "z")), "truth": truth} for truth, predicted in pairs]
    page = write([*records, make_record(SIZE)])
    cells = re.findall(r'<td class="(\w+) s\d" data-truth="(\w+)" data-class="(\w+)">(\d+)</td>', page)
    assert cells == [
        ("agrees", "a", "a", "2"),
        ("differs", "a", "b", "1"),
        ("agrees", "b", "b", "1"),
        ("differs", "other", "b", "1"),
    ]
    assert "label for 3 of 5 answers with a label" in Elements(page).text


def test_many_classes_have_a_list_of_confusions(write: Page, make_record) -> None:
    records = [{**make_record(SIZE, labels=(f"kind {i}", "z")), "truth": f"kind {i + 1}"} for i in [*range(100), 42]]
    page = write(records, limit=0)
    assert 'class="matrix"' not in page
    rows = re.findall(r'data-truth="([^"]+)" data-class="([^"]+)">(\d+)<', page)
    assert rows[0] == ("kind 43", "kind 42", "2")
    assert len(rows) == 60
    assert "40 more pairs not listed." in Elements(page).text


def test_slots_have_their_names_and_a_run_without_labels_no_filter_for_them(write: Page, make_record) -> None:
    record = make_record(SIZE)
    record["evidence"][1]["name"] = "beak"
    page = write([record])
    assert "<bdi>beak</bdi>" in page
    assert '"beak"' in page
    assert "<label hidden>Label" in page
    assert "Labels and classes" not in page


def test_an_exception_leaves_nothing_and_the_earlier_report_alone(tmp_path: Path, make_record, write: Page) -> None:
    (tmp_path / "report.html").write_text("earlier")

    def records() -> Iterator[Any]:
        yield make_record(SIZE)
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        write(records())
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"report.html": "earlier"}


def test_a_report_appears_when_it_is_closed_and_takes_no_more(tmp_path: Path, make_record) -> None:
    path = tmp_path / "report.html"
    report = ReportWriter(path, title="Run", facts=[])
    report.add(make_record(SIZE), None)
    assert not path.exists()
    report.close()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ValueError, match="closed already"):
        report.add(make_record(SIZE), None)
    with pytest.raises(ValueError, match="closed already"):
        report.close()


def test_a_report_of_no_images_is_a_page(write: Page) -> None:
    assert "No image has an answer." in Elements(write([])).text


def test_a_model_without_evidence_has_cards_that_say_so(write: Page, answer_without_evidence) -> None:
    overlay = draw_overlay(Image.new("RGB", SIZE), answer_without_evidence)
    text = Elements(write([(answer_without_evidence, overlay)])).text
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
    overlay = draw_overlay(image, record)
    overlay = encode_jpeg(overlay) if encoded else overlay
    small = Image.open(io.BytesIO(make_thumbnail(overlay, record)))
    assert small.size == expected
    # the last row and column are still the photograph, not the legend's paper
    for place in ((expected[0] - 1, 0), (expected[0] - 1, expected[1] - 1), (0, expected[1] - 1)):
        assert max(abs(a - b) for a, b in zip(small.getpixel(place), (10, 20, 120), strict=True)) < 25
