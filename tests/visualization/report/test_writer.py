import io
import json
import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace
from PIL import Image

from opal_deploy.records.build import error_record
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
from opal_deploy.visualization.pages import to_json
from opal_deploy.visualization.report import ReportOptions, ReportWriter, choose_image_mode, make_thumbnail, writer
from tests.bright import memory_under

HOSTILE = "<script>alert(1)</script>\"'&\n\udcff</title><img src=x onerror=alert(2)>.jpg"
SIZE = (200, 200)
BAD = error_record("bad.jpg", "truncated_image", "cut short")


def text_of(page):
    """Return the text of a page, as a reader without styles sees it."""
    parser, found = HTMLParser(), []
    parser.handle_data = found.append
    parser.feed(page)
    return "".join(found)


@pytest.fixture
def write(write_report):
    return lambda *arguments, **options: write_report(*arguments, **options).read_text(encoding="utf-8")


def test_hostile_names_labels_and_messages_stay_text_on_a_self_contained_page(write, make_record):
    record = make_record(SIZE, image=HOSTILE, labels=(HOSTILE, HOSTILE))
    entries = [(record, draw_overlay(Image.new("RGB", SIZE), record)), error_record(HOSTILE, HOSTILE, HOSTILE)]
    page = write(entries, [(HOSTILE, HOSTILE)], title=HOSTILE, facts=[(HOSTILE, HOSTILE)])
    # what the browser makes of it is the subject of test_browser.py
    assert (page.count("<script"), page.count("<img"), page.count("<h1")) == (5, 0, 1)
    assert "<script>alert(1)</script>\"'&\\n\\udcff</title>" in text_of(page)
    links = re.findall(r' (?:src|href|srcset|data|action)="([^"]*)"', page)
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\(|@import", page)


def test_nothing_from_outside_can_end_a_block_of_data():
    hostile = ["</script>", "<!--<script>", "]]>&lt;", "\u2028\ud800"]
    text = to_json(hostile)
    assert not set(text) & set("<>&\u2028")
    assert text.isascii()
    assert json.loads(text) == hostile


def test_counts_are_those_of_the_records(write, make_record):
    failed = [error_record(f"{name}.jpg", "truncated_image", "cut short " + name) for name in ("x", "y")]
    records = [*[make_record(SIZE)] * 3, make_record(SIZE, min_margin=1.5), *failed]
    page = write(records, [("Took", "2 s")], facts=[("Model", "ckpt.onnx")])
    tiles = re.findall(r"<b>([\d,]+)</b><span>(\w+)</span>", page)
    assert tiles == [("6", "images"), ("3", "answered"), ("1", "abstained"), ("2", "failed")]
    text = text_of(page)
    for part in ("1 class in 4 answers", "truncated_image 2", "cut short y"):
        assert part in text
    assert text.index("About this run") < text.index("ckpt.onnx") < text.index("Took")


def read_data(page, name):
    return json.loads(re.search(f'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)[1])


def test_only_the_first_images_and_the_most_frequent_classes_are_shown_and_the_page_says_so(
    tmp_path, make_record, monkeypatch
):
    monkeypatch.setattr(writer, "REPORT_LIMIT", 2)
    embedding = []
    with ReportWriter(tmp_path / "report.html", ReportOptions()) as report:
        for i in range(1500):
            embedding.append(report.embeds_images)
            record = make_record(SIZE, image=f"{i:04}.jpg")
            # the later a class, the rarer
            answer = replace(record.prediction, class_id=i % 40, label=f"kind {i % 40}")
            report.add(replace(record, prediction=answer), None)
        for i in range(5):
            report.add(replace(BAD, image=f"bad{i}.jpg"), None)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(read_data(page, "index")) == 4, "two images, two failures"
    assert embedding[:3] == [True, True, False]
    for part in (
        "Showing the first 2 of 1,500 answered images; results.jsonl has all.",
        "Showing the first 2; results.jsonl has all.",
        "kind 29",
        "10 more classes not listed.",
    ):
        assert part in text_of(page)
    assert "bad2.jpg" not in page
    assert "kind 30" not in text_of(page)


def test_cards_wait_on_disk_not_in_memory(tmp_path, make_record):
    record = make_record((480, 480))
    thumbnail = make_thumbnail(Image.effect_noise((480, 480), 90).convert("RGB"), record)
    with ReportWriter(tmp_path / "report.html", ReportOptions()) as report:
        report.add(record, thumbnail)
        with memory_under(1_000_000):
            for i in range(100):
                report.add(replace(record, margin=i / 1000), thumbnail)
    assert (tmp_path / "report.html").stat().st_size > 100 * 30_000


def test_a_page_shows_drawings_of_the_runs_folder_and_nothing_else(write, make_record):
    names = ["overlays/000000-a.jpg", "overlays/0001/010000-a.jpg", "../b.jpg", "overlays/../../c.jpg", "file:///d.jpg"]
    page = write([replace(make_record(SIZE), overlay=name) for name in names], image_mode="files")
    assert [card["overlay"] for card in read_data(page, "d0")] == [*names[:2], None, None, None]
    assert "d.jpg" not in page
    # few images are embedded
    assert [choose_image_mode(count) for count in (0, 200, 201)] == ["embed", "embed", "files"]


def test_labels_are_set_against_classes(write, make_record):
    pairs = [("a", "a"), ("a", "a"), ("a", "b"), ("b", "b"), ("other", "b")]
    records = [replace(make_record(SIZE, labels=(predicted, "z")), label=label) for label, predicted in pairs]
    page = write([*records, make_record(SIZE)], class_names=frozenset("ab"))
    cells = re.findall(r'<td class="(\w+) s\d" data-label="(\w+)" data-class="(\w+)">(\d+)</td>', page)
    assert [" ".join(cell) for cell in cells] == ["agrees a a 2", "differs a b 1", "agrees b b 1", "differs other b 1"]
    assert "Accuracy: 3 of 4, including abstentions. 1 image with a label that the model does not know" in text_of(page)
    assert "<b>3 of 4</b><span>correct</span>" in page


def test_a_class_that_is_never_predicted_is_said_first_and_has_its_column(write, make_record):
    record = make_record(SIZE, labels=("a", "z"))
    statuses = ["ok", "ok", "unknown"]
    records = [replace(record, label=label, status=status) for label, status in zip("abb", statuses, strict=True)]
    page = write(records, class_names=frozenset("ab"))
    text = text_of(page)
    assert text.index("Never predicted: b (2 images)") < text.index("Images")
    assert re.search(r'<th scope="col" class="tilt"><span><bdi>b</bdi>', page)
    assert "Accuracy: 1 of 3, including abstentions; of the 2 answered, 1 correct." in text


def test_many_classes_have_a_list_of_confusions(write, make_record, monkeypatch):
    monkeypatch.setattr(writer, "REPORT_LIMIT", 0)
    records = [replace(make_record(SIZE, labels=(f"kind {i}", "z")), label=f"kind {i + 1}") for i in [*range(100), 42]]
    page = write(records)
    assert 'class="matrix"' not in page
    rows = re.findall(r'data-label="([^"]+)" data-class="([^"]+)">(\d+)<', page)
    assert rows[0] == ("kind 43", "kind 42", "2")
    assert len(rows) == 60
    assert "40 more pairs not listed." in text_of(page)


def test_slots_have_their_names_and_a_run_without_labels_no_filter_for_them(write, make_record):
    record = make_record(SIZE)
    first, second, third = record.evidence
    page = write([replace(record, evidence=(first, replace(second, name="beak"), third))])
    for part in ('"beak"', "<label hidden>Label"):
        assert part in page
    assert "Labels and predictions" not in page


def test_an_exception_leaves_nothing_and_the_earlier_report_alone(tmp_path, make_record, write):
    (tmp_path / "report.html").write_text("earlier")

    def records():
        yield make_record(SIZE)
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        write(records())
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"report.html": "earlier"}


def test_a_report_appears_when_it_is_closed_and_takes_no_more(tmp_path, make_record):
    report = ReportWriter(tmp_path / "report.html", ReportOptions())
    report.add(make_record(SIZE), None)
    assert not (tmp_path / "report.html").exists()
    report.close()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ValueError, match="closed"):
        report.close()


def test_a_page_of_no_images_and_one_of_a_model_without_evidence_say_so(write, answer_without_evidence):
    assert "No image was answered." in text_of(write([]))
    overlay = draw_overlay(Image.new("RGB", SIZE), answer_without_evidence)
    assert "No evidence boxes" in read_data(write([(answer_without_evidence, overlay)]), "config")["no_evidence"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1000, 500), (480, 240)), ((300, 200), (300, 200)), ((400, 1280), (200, 640)), ((2500, 2000), (480, 384))],
)
@pytest.mark.parametrize("encode", [encode_jpeg, lambda overlay: overlay], ids=["encoded", "image"])
def test_a_thumbnail_is_the_photograph_alone(make_record, size, expected, encode):
    record = make_record(size, [(0, 0)])
    overlay = encode(draw_overlay(Image.new("RGB", size, (10, 20, 120)), record))
    small = Image.open(io.BytesIO(make_thumbnail(overlay, record)))
    assert small.size == expected
    # the last row and column are still the photograph, not the caption's paper
    for place in ((expected[0] - 1, 0), (expected[0] - 1, expected[1] - 1), (0, expected[1] - 1)):
        assert max(abs(a - b) for a, b in zip(small.getpixel(place), (10, 20, 120), strict=True)) < 25
