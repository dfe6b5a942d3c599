"""The report in a real browser: what a script, a key or a hostile name does there."""

import pytest
from msgspec.structs import replace
from PIL import Image
from playwright.sync_api import expect

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.records.build import error_record
from opal_deploy.visualization.report import ReportOptions, ReportWriter, make_thumbnail
from tests.browser import find_violations, needs_axe

SIZE = (300, 200)
HOSTILE = (
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 2</script>",
    "\"><img src=x onerror='window.hit = 3'>",
    "' onmouseover='window.hit = 4' x='",
    "javascript:window.hit=5",
    "<!--<script>",
    "]]></title><svg onload=window.hit=6>",
    "{{ 7 * 7 }}\u2028\u202e${window.hit=8}",
    "a\n\udcff&amp;&lt;b",
)
OPEN_DETAILS = "document.querySelectorAll('details').forEach(d => d.open = true)"
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory, make_record):
    """60 images of two classes with labels, three of them wrong; margins fall; 2 failures."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    with ReportWriter(path, ReportOptions((("Model", "m.onnx"),), title="Run")) as writer:
        for i in range(60):
            labels = ("Auklet", "Albatross") if i % 2 else ("Albatross", "Auklet")
            record = make_record(SIZE, image=f"birds/{i:02}.jpg", labels=labels)
            probability = 1 - i / 100 if i % 3 else None
            record = replace(
                record,
                margin=0.9 - i / 100,
                prediction=replace(record.prediction, calibrated_probability=probability),
                status="ok" if i < 56 else "abstained",
                label="Albatross" if i in (1, 3, 5) else labels[0],
            )
            writer.add(record, Image.new("RGB", (300, 400), (i, 90, 120)))
        writer.add(error_record("birds/bad.jpg", "truncated_image", "cut short"), None)
        writer.add(error_record("birds/none.jpg", "empty_file", "0 bytes"), None)
    return path


@pytest.mark.slow
def test_receptive_fields_are_shown_on_demand_on_cards_and_in_the_dialog(open_page, make_record, tmp_path):
    path, record = tmp_path / "report.html", make_record((300, 400), [(2, 2), (2, 2), (0, 0)])
    with ReportWriter(path, ReportOptions(field=EffectiveField(2, 0.5, (5, 5)))) as writer:
        writer.add(record, Image.new("RGB", (300, 400)))
    page = open_page(path)
    first = page.locator("#cards .field").first
    expect(first).to_be_hidden()
    page.get_by_label("Effective receptive fields").check()
    expect(first).to_be_visible()
    drawn = page.locator("#cards .field:not(.case)").evaluate_all("all => all.map(r => r.getAttribute('x'))")
    assert drawn == ["90", "0"]  # two cells, 60 pixels wide
    page.locator("#cards h3 a").click()
    expect(page.locator("#sheet .field").first).to_be_visible()
    page.get_by_role("button", name="Receptive fields").click()
    expect(page.locator("#sheet .field").first).to_be_hidden()
    assert not page.problems


def names(page):
    return page.locator("#cards h3").all_text_contents()


def choose_order(page, value):
    page.check(f"[name=sort][value={value}]")


@pytest.mark.slow
def test_boxes_can_be_hidden_or_shown_alone_where_the_page_draws_them(open_page, write_report, make_record):
    record = make_record(SIZE, [(0, 0), (2, 2), (2, 2)], [0.02, 0.9, 0.45])
    photograph = Image.new("RGB", SIZE, (10, 20, 200))
    page = open_page(write_report([(record, make_thumbnail(photograph, record)), (record, photograph)]))
    choose_order(page, "input")  # drawn by the script
    plain, overlay = page.locator("#cards article").all()
    assert plain.locator(".box text").all_text_contents() == ["0", "1", "2"]
    assert plain.locator(".box.faint text").all_text_contents() == ["0"]
    assert plain.locator(".box.strongest text").all_text_contents() == ["1"]
    expect(overlay.locator(".box")).to_have_count(0)  # they are in the picture
    for mode, has_boxes, is_veiled in (
        ("no boxes", False, False),
        ("patches only", True, True),
        ("boxes", True, False),
    ):
        page.get_by_label("Show").select_option(label=mode)
        expect(plain.locator(".box").first).to_be_visible(visible=has_boxes)
        expect(plain.locator(".veil")).to_be_visible(visible=is_veiled)
    assert not page.problems


def image_widths(page):
    script = "all => Promise.all(all.map(i => (i.loading = 'eager', i.decode()).then(() => i.naturalWidth)))"
    return page.locator("#cards img").evaluate_all(script)


def expect_open(page, name):
    """Wait until the dialog shows the image of that name; None: until it is closed."""
    if name is None:
        expect(page.locator("#sheet")).to_be_hidden()
    else:
        expect(page.locator("#sheet[open] #sheet-title")).to_have_text(name)


def test_each_order_pages_through_all_images(open_page, report):
    page = open_page(report)
    # the median of all margins
    assert names(page)[0] == "birds/29.jpg"
    expect(page.locator("#typical")).to_contain_text("closest to the median, 0.610")
    assert "calibrated probability0.710" in page.locator("#cards article").first.text_content()
    expect(page.locator("#found")).to_have_text("62 images, 1 to 48 shown")
    assert image_widths(page) == [300] * 48
    choose_order(page, "input")
    assert names(page)[:3] == ["birds/00.jpg", "birds/01.jpg", "birds/02.jpg"]
    choose_order(page, "margin")
    expect(page.locator("#typical")).to_be_hidden()
    assert names(page)[0] == "birds/59.jpg"
    page.click("#next")
    expect(page.locator("#found")).to_have_text("62 images, 49 to 62 shown")
    assert names(page)[-2:] == ["birds/bad.jpg", "birds/none.jpg"]
    assert image_widths(page) == [300] * 12
    page.locator("button[type=reset]").dispatch_event("click")
    expect(page.locator("#typical")).to_be_visible()
    assert page.problems == []


FILTERS = [
    ("search", "BIRDS/1", 10), ("search", "nowhere", 0), ("class", "Albatross (30)", 30), ("label", "Auklet (27)", 27),
    ("verdict", "wrong", 3), ("verdict", "correct", 57), ("status", "answered (56)", 56),
    ("status", "abstained (4)", 4), ("status", "failed: truncated_image (1)", 1),
]  # fmt: skip


def test_each_filter_leaves_what_matches_it(open_page, report):
    page = open_page(report)
    page.get_by_text("Filters").click()
    for field, value, count in FILTERS:
        if field == "search":
            page.fill(f"#{field}", value)
        else:
            page.select_option(f"#{field}", label=value)
        assert page.locator("#found").text_content().startswith(f"{count} image"), (field, value)
        assert len(names(page)) == min(count, 48), (field, value)
        page.locator("button[type=reset]").dispatch_event("click")
        expect(page.locator("#found")).to_have_text("62 images, 1 to 48 shown")
    # not a click at a place, from which images that are still being loaded may push it away
    page.locator(".matrix [data-label=Albatross][data-class=Auklet] button").dispatch_event("click")
    expect(page.locator("#cards h3")).to_have_text(["birds/05.jpg", "birds/03.jpg", "birds/01.jpg"])


@pytest.mark.slow
def test_keys_lead_through_the_open_images(open_page, report):
    page = open_page(report)
    choose_order(page, "margin")
    press, focused = page.keyboard.press, page.locator(":focus")
    page.get_by_role("link", name="birds/58.jpg").focus()
    press("Enter")
    expect_open(page, "birds/58.jpg")
    press("ArrowRight")
    expect_open(page, "birds/57.jpg")
    assert page.url.endswith("#i=57")
    press("Escape")
    expect_open(page, None)
    expect(focused).to_have_text("birds/57.jpg")
    assert "#" not in page.url


@pytest.mark.slow
def test_an_address_leads_to_one_image_or_says_that_there_is_none(open_page, report):
    page = open_page(report, "#i=7")
    expect_open(page, "birds/07.jpg")
    page.evaluate("location.hash = '#images'")
    expect_open(page, None)
    for fragment in ("#i=999", "#i=<script>"):
        page = open_page(report, fragment)
        expect(page.locator("#found")).to_contain_text("not on this page")
        expect_open(page, None)
        assert page.problems == []


@pytest.mark.parametrize("image_mode", ["embed", "files"])
def test_no_hostile_text_is_executed(open_page, write_report, make_record, image_mode):
    entries = []
    for text in HOSTILE:
        record = make_record(SIZE, image=text, labels=(text, text + "2"))
        slots = (replace(record.evidence[0], name=text), *record.evidence[1:])
        record = replace(record, label=text + "3", overlay=text, evidence=slots)
        entries += [(record, Image.new("RGB", SIZE)), error_record(text, text, text)]
    path = write_report(entries, title=HOSTILE[1], facts=[(HOSTILE[0], HOSTILE[1])], image_mode=image_mode)
    page = open_page(path)
    choose_order(page, "input")
    page.fill("#search", HOSTILE[1])
    assert names(page) == [HOSTILE[1]] * 2
    page.fill("#search", "")
    page.evaluate(OPEN_DETAILS)
    page.evaluate("document.querySelectorAll('#cards *').forEach(e => e.dispatchEvent(new MouseEvent('mouseover')))")
    for i in range(2 * len(HOSTILE)):
        page.evaluate(f"location.hash = '#i={i}'")
        expect(page.locator("#sheet-place")).to_have_text(f"{i + 1} of {2 * len(HOSTILE)}")
    assert page.evaluate("window.hit ?? null") is None
    assert page.problems == []
    tags = set(page.evaluate("[...document.querySelectorAll('body *')].map(e => e.localName)"))
    assert not tags & {"iframe", "object", "embed", "base", "title"}
    expect(page.locator("[onerror], [onload], [onmouseover], [style*=hit]")).to_have_count(0)
    addresses = page.evaluate(
        "[...document.querySelectorAll('[href], [src]')].map(e => e.getAttribute('href') || e.src)"
    )
    assert all(address.startswith(("#", "data:image/jpeg")) for address in addresses)
    expect(page.locator("script:not([type])")).to_have_count(1)


def test_the_policy_stops_a_script_that_got_in_anyway(open_page, report, tmp_path):
    injected = "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'><p style='color: red' id='red'>"
    text = report.read_text(encoding="utf-8").replace("<main>", "<main>" + injected, 1)
    (tmp_path / "broken.html").write_text(text, encoding="utf-8")
    page = open_page(tmp_path / "broken.html")
    assert page.evaluate("window.hit ?? null") is None
    expect(page.locator("#red")).not_to_have_css("color", "rgb(255, 0, 0)")
    assert sum("Content Security Policy" in problem for problem in page.problems) >= 3


@pytest.mark.slow
def test_without_scripts_the_page_says_so_and_keeps_its_tables(open_page, report):
    page = open_page(report, java_script_enabled=False)
    expect(page.locator("main noscript p")).to_be_visible()
    expect(page.get_by_role("heading", name="Predicted classes")).to_be_visible()
    expect(page.locator(".orders")).to_be_hidden()  # what does nothing is not shown


@pytest.mark.slow
@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(open_page, report, scheme, width):
    page = open_page(report, width=width, bypass_csp=True, color_scheme=scheme)
    steps = {"grid": lambda: page.evaluate(OPEN_DETAILS), "sheet": lambda: page.locator("h3 a").first.click()}
    for state, step in steps.items():
        step()
        assert find_violations(page) == [], state


@pytest.mark.slow
def test_ten_thousand_images_can_be_looked_through(open_page, write_report, make_record):
    record, margins = make_record(SIZE), [(i * 7919 % 10_000) / 10_000 for i in range(10_000)]
    records = (replace(record, image=f"birds/{i:05}.jpg", margin=margin) for i, margin in enumerate(margins))
    page = open_page(write_report(records, image_mode="files"))
    expect(page.locator("#found")).to_have_text("10,000 images, 1 to 48 shown")
    expect(page.locator("#cards article")).to_have_count(48)
    page.fill("#search", "birds/0999")
    expect(page.locator("#found")).to_have_text("10 images of 10,000")
    page.evaluate("location.hash = '#i=9999'")
    expect_open(page, "birds/09999.jpg")
