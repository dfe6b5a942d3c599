"""The report in a real browser: what a script, a key or a hostile name does there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from opal_deploy.records.record import error_record
from opal_deploy.visualization.overlay import encode_overlay
from opal_deploy.visualization.report import ReportWriter, make_thumbnail

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
)
# Chromium reads commands from the descriptor 3 and answers on 4
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 103); os.dup2(int(sys.argv[2]), 104); "
    "os.dup2(103, 3); os.dup2(104, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One tab of a headless Chromium, spoken to over a pipe: no port, no driver."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours, theirs = os.pipe(), os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(ours[0]), str(theirs[1])]
        self._process = subprocess.Popen(
            [*command, CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(ours[0], theirs[1]), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._out, self._in = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log"):
            self.send(f"{room}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)

    def send(self, method: str, **parameters: Any) -> Any:
        """The answer to one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._in.read1(1 << 20)
            assert part, "Chromium ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path, fragment: str = "", *, width: int = 1280, scripts: bool = True) -> None:
        """Load a page from the disk."""
        self.size(width)
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        # a fragment alone would only be followed
        self._load("about:blank")
        self.events.clear()
        self._load(path.resolve().as_uri() + fragment)

    def _load(self, address: str) -> None:
        loader = self.send("Page.navigate", url=address)["loaderId"]
        while not any(
            event["params"].get("loaderId") == loader and event["params"].get("name") == "load" for event in self.events
        ):
            self._receive()

    def size(self, width: int, height: int = 900) -> None:
        """Set the window's size in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def js(self, expression: str) -> Any:
        """An expression's value, a promise's too."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
        extra = {"windowsVirtualKeyCode": codes.get(key, 0)}
        text = "\r" if key == "Enter" else text
        self.send(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **extra, **({"text": text} if text else {})
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **extra)
        self.settle()

    def settle(self) -> None:
        """Let the page do what it put off."""
        self.js("new Promise(done => setTimeout(done, 30))")

    def choose(self, name: str, value: str) -> None:
        """Set a field of the form as a person does."""
        self.js(
            f"(() => {{ const f = document.getElementById({name!r}); f.value = {value!r}; "
            "f.dispatchEvent(new Event('input', {bubbles: true})); "
            "f.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def close(self) -> None:
        """End it, and all that it started."""
        self._out.close()
        self._in.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)


pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(os.name == "nt", reason="the pipe to Chromium needs POSIX descriptors"),
]

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
SIZE = (300, 200)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def report(tmp_path: Path, make_record: Any) -> Path:
    """60 images of two classes with labels, three of them wrong; margins fall; 2 failures."""
    path = tmp_path / "report.html"
    with ReportWriter(path, title="Run", facts=[("Model", "m.onnx")]) as writer:
        for i in range(60):
            labels = ("Auklet", "Albatross") if i % 2 else ("Albatross", "Auklet")
            record = make_record(SIZE, image=f"birds/{i:02}.jpg", labels=labels)
            record["margin"] = 0.9 - i / 100
            record["status"] = "ok" if i < 56 else "abstained"
            record["truth"] = "Albatross" if i in (1, 3, 5) else labels[0]
            writer.add(record, Image.new("RGB", (300, 400), (i, 90, 120)))
        writer.add(error_record("birds/bad.jpg", "truncated_image", "cut short"), None)
        writer.add(error_record("birds/none.jpg", "empty_file", "0 bytes"), None)
    return path


def names(browser: Browser) -> list[str]:
    return browser.js("[...document.querySelectorAll('#cards h3')].map(h => h.textContent)")


def found(browser: Browser) -> str:
    return browser.js("document.getElementById('found').textContent")


def is_open(browser: Browser) -> str | None:
    return browser.js(
        "document.getElementById('sheet').open ? document.getElementById('sheet-title').textContent : null"
    )


def complaints(browser: Browser) -> list[str]:
    browser.settle()
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
    return [json.dumps(event["params"]) for event in browser.events if event["method"] in kinds]


def test_a_browser_starts_with_the_least_certain(browser: Browser, report: Path) -> None:
    browser.open(report)
    shown = names(browser)
    assert shown[:2] == ["birds/59.jpg", "birds/58.jpg"]
    assert len(shown) == 48
    assert found(browser) == "62 images, 1 to 48 here"
    assert not complaints(browser)


def test_what_the_script_draws_is_what_the_file_holds(browser: Browser, report: Path) -> None:
    browser.open(report)
    # closed parts of drawn cards are made when they are opened
    text = """(document.querySelectorAll('#cards details').forEach(d => d.open = true),
        new Promise(done => setTimeout(done, 50)).then(() => [...document.querySelectorAll('#cards article')].map(
            a => [a.id, a.textContent.replace(/\\s+/g, ''), a.querySelector('img')?.alt])))"""
    written = browser.js(text)
    browser.choose("sort", "input")
    browser.choose("sort", "margin")
    drawn = browser.js(text)
    assert len(written) == 48
    assert drawn == written


@pytest.mark.parametrize(
    ("field", "value", "count"),
    [
        ("search", "BIRDS/1", 10),
        ("search", "nowhere", 0),
        ("class", "Albatross (30)", 30),
        ("truth", "Auklet (27)", 27),
        ("verdict", "differ", 3),
        ("verdict", "agree", 57),
        ("verdict", "unlabelled", 2),
        ("status", "ok", 56),
        ("status", "abstained", 4),
        ("status", "error:truncated_image", 1),
        ("low", "0.85", 6),
        ("high", "0.35", 5),
    ],
)
def test_each_filter_leaves_what_fits_it(browser: Browser, report: Path, field: str, value: str, count: int) -> None:
    browser.open(report)
    chosen = browser.js(
        f"[...(document.getElementById({field!r}).options || [])].find(o => o.textContent === {value!r})?.value"
    )
    browser.choose(field, value if chosen is None else chosen)
    assert found(browser).startswith(f"{count} image")
    assert len(names(browser)) == min(count, 48)
    browser.js("document.getElementById('tools').reset()")
    browser.settle()
    assert found(browser) == "62 images, 1 to 48 here"


def test_sorting_by_input_and_by_class(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.choose("sort", "input")
    assert names(browser)[:3] == ["birds/00.jpg", "birds/01.jpg", "birds/02.jpg"]
    browser.choose("sort", "class")
    assert names(browser)[:2] == ["birds/58.jpg", "birds/56.jpg"]
    browser.choose("sort", "certain")
    assert names(browser)[0] == "birds/00.jpg"
    browser.js("document.getElementById('next').click()")
    assert names(browser)[-2:] == ["birds/bad.jpg", "birds/none.jpg"]


def test_keys_lead_through_the_images(browser: Browser, report: Path) -> None:
    browser.open(report)
    focused = "document.activeElement.textContent"
    browser.key("ArrowRight")
    assert browser.js(focused) == "birds/59.jpg"
    browser.key("ArrowRight")
    assert browser.js(focused) == "birds/58.jpg"
    browser.key("Enter")
    assert is_open(browser) == "birds/58.jpg"
    browser.key("ArrowRight")
    assert is_open(browser) == "birds/57.jpg"
    assert browser.js("location.hash") == "#i=57"
    browser.key("Escape")
    assert is_open(browser) is None
    assert browser.js(focused) == "birds/57.jpg"
    assert browser.js("location.hash") == ""
    browser.key("End")
    browser.key("ArrowRight")
    assert browser.js(focused) == "birds/11.jpg", "the next page's first"
    browser.key("/")
    assert browser.js("document.activeElement.id") == "search"
    browser.key("?", "?")
    assert browser.js("document.getElementById('help').open") is False, "typed, not asked"
    browser.js("document.activeElement.blur()")
    browser.key("?", "?")
    assert browser.js("document.getElementById('help').open") is True


@pytest.mark.parametrize("fragment", ["#i=7", "#name=birds%2F07.jpg", "#name=birds/07.jpg"])
def test_an_address_leads_to_one_image(browser: Browser, report: Path, fragment: str) -> None:
    browser.open(report, fragment)
    browser.settle()
    assert is_open(browser) == "birds/07.jpg"
    browser.js("location.hash = '#images'")
    browser.settle()
    assert is_open(browser) is None


@pytest.mark.parametrize("fragment", ["#i=999", "#name=%E0%A4%A", "#i=<script>"])
def test_an_address_of_no_image_is_answered_so(browser: Browser, report: Path, fragment: str) -> None:
    browser.open(report, fragment)
    browser.settle()
    assert is_open(browser) is None
    assert "not shown here" in found(browser)
    assert not complaints(browser)


def test_a_number_of_the_confusion_matrix_shows_its_images(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.js("document.querySelector('.matrix [data-truth=Albatross][data-class=Auklet] button').click()")
    browser.settle()
    assert names(browser) == ["birds/05.jpg", "birds/03.jpg", "birds/01.jpg"]


def test_all_pictures_appear(browser: Browser, report: Path) -> None:
    browser.open(report)
    sizes = "Promise.all([...document.querySelectorAll('#cards img')].map(i => i.decode().then(() => i.naturalWidth)))"
    assert browser.js(sizes) == [300] * 48
    browser.js("document.getElementById('next').click()")
    assert browser.js(sizes) == [300] * 12


def test_drawings_beside_the_page_appear_without_their_legends(
    browser: Browser, tmp_path: Path, make_record: Any
) -> None:
    (tmp_path / "overlays").mkdir()
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[], pictures="files") as writer:
        for i, size in enumerate([(300, 200), (200, 300), (200, 400), (900, 300)]):
            record = make_record(size, image=f"{i}.jpg")
            record["overlay"] = f"overlays/{i:06}-{i}.jpg"
            photograph = Image.new("RGB", size, (10, 20, 200))
            (tmp_path / record["overlay"]).write_bytes(encode_overlay(photograph, record))
            writer.add(record, None)
    browser.open(tmp_path / "report.html")
    for _ in range(2):
        shown = browser.js(
            "Promise.all([...document.querySelectorAll('#cards img')].map(async i => { i.loading = 'eager'; "
            "await i.decode(); const f = i.parentNode.getBoundingClientRect(); "
            "return [f.width / f.height, f.width * i.naturalWidth / i.getBoundingClientRect().width]; }))"
        )
        for (ratio, width), size in zip(shown, [(300, 200), (200, 300), (200, 400), (900, 300)], strict=True):
            assert ratio == pytest.approx(size[0] / size[1], abs=0.02)
            assert width == pytest.approx(size[0], rel=0.01), "the drawing's part that is seen is the photograph"
        browser.choose("sort", "input")
    assert not complaints(browser)


def test_an_open_image_leads_to_its_drawing_and_its_sheet(browser: Browser, tmp_path: Path, make_record: Any) -> None:
    files = {"overlay": "overlays/000000-a.jpg", "sheet": "sheets/000000-a.png"}
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as writer:
        writer.add({**make_record((300, 200), image="a.jpg"), **files}, None)
        writer.add({**make_record((300, 200), image="b.jpg"), "sheet": "../../secret.png"}, None)
    links = "[...document.querySelectorAll('dialog[open] a')].map(a => a.getAttribute('href'))"
    found = []
    for number in range(2):
        browser.open(tmp_path / "report.html", f"#i={number}")
        found.append(browser.js(links))
    assert found == [list(files.values()), []]


@pytest.mark.parametrize("pictures", ["embed", "files"])
def test_no_hostile_text_is_executed(
    browser: Browser, tmp_path: Path, make_record: Any, pictures: Literal["embed", "files"]
) -> None:
    path = tmp_path / "report.html"
    with ReportWriter(path, title=HOSTILE[1], facts=[(HOSTILE[0], HOSTILE[1])], pictures=pictures) as writer:
        for text in HOSTILE:
            record = make_record(SIZE, image=text, labels=(text, text + "2"))
            record["truth"] = text + "3"
            record["overlay"] = text
            record["evidence"][0]["name"] = text
            writer.add(record, Image.new("RGB", SIZE))
            writer.add(error_record(text, text, text), None)
    browser.open(path, "#name=" + HOSTILE[0])
    browser.settle()
    assert is_open(browser) == HOSTILE[0]
    browser.key("Escape")
    for field, value in (("sort", "class"), ("sort", "input"), ("search", HOSTILE[1])):
        browser.choose(field, value)
    assert names(browser) == [HOSTILE[1]] * 2
    browser.choose("search", "")
    browser.js(
        "(document.querySelectorAll('details').forEach(d => d.open = true),"
        "document.querySelectorAll('#cards *').forEach(e => e.dispatchEvent(new MouseEvent('mouseover'))))"
    )
    for i in range(2 * len(HOSTILE)):
        browser.js(f"location.hash = '#i={i}'")
        browser.settle()
        assert is_open(browser) is not None
    assert browser.js("window.hit") is None
    assert not complaints(browser)
    tags = set(browser.js("[...document.querySelectorAll('body *')].map(e => e.localName)"))
    assert not tags & {"iframe", "object", "embed", "base", "title"}
    assert browser.js("document.querySelectorAll('[onerror], [onload], [onmouseover], [style*=hit]').length") == 0
    addresses = browser.js("[...document.querySelectorAll('[href], [src]')].map(e => e.getAttribute('href') || e.src)")
    assert all(address.startswith(("#", "data:image/jpeg")) for address in addresses)
    assert browser.js("document.querySelectorAll('script:not([type])').length") == 1


def test_the_policy_stops_a_script_that_got_in_anyway(browser: Browser, report: Path, tmp_path: Path) -> None:
    page = report.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    inside = "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'><p style='color: red' id='red'>"
    broken.write_text(page.replace("<main>", "<main>" + inside, 1), encoding="utf-8")
    browser.open(broken)
    refused = complaints(browser)
    assert browser.js("window.hit") is None
    assert browser.js("getComputedStyle(document.getElementById('red')).color") != "rgb(255, 0, 0)"
    assert sum("Content Security Policy" in text for text in refused) >= 3


def test_without_scripts_cards_and_tables_are_there(browser: Browser, report: Path) -> None:
    browser.open(report, scripts=False)
    snapshot = browser.send("DOMSnapshot.captureSnapshot", computedStyles=["display"])
    strings, document = snapshot["strings"], snapshot["documents"][0]
    drawn = [strings[i] for i in document["layout"]["text"] if i >= 0]
    assert sum(text.startswith("58.jpg") for text in drawn) == 1
    assert "least certain" in " ".join(drawn)
    assert "Classes predicted" in drawn
    assert "Order" not in drawn, "what does nothing is not shown"


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("state", ["grid", "sheet"])
def test_nothing_is_wider_than_the_window(browser: Browser, report: Path, width: int, state: str) -> None:
    browser.open(report, "#i=3" if state == "sheet" else "", width=width)
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.settle()
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    if state == "sheet":
        assert browser.js("(s => s.scrollWidth <= s.clientWidth)(document.getElementById('sheet'))")


def test_a_sheet_is_printed_alone(browser: Browser, report: Path) -> None:
    browser.open(report, "#i=3")
    browser.settle()
    browser.send("Emulation.setEmulatedMedia", media="print")
    try:
        shown = "e => getComputedStyle(document.querySelector(e)).display !== 'none'"
        assert browser.js(f"['main', 'header', '.bar-top', '#sheet', '#sheet .slots'].map({shown})") == [
            False, False, False, True, True,
        ]  # fmt: skip
    finally:
        browser.send("Emulation.setEmulatedMedia", media="")


def test_printed_photographs_are_whole(browser: Browser, tmp_path: Path, make_record: Any) -> None:
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[]) as writer:
        for size in ((200, 500), (300, 200)):
            writer.add(make_record(size), make_thumbnail(Image.new("RGB", size), make_record(size)))
    browser.open(tmp_path / "report.html", width=794)
    browser.send("Emulation.setEmulatedMedia", media="print")
    try:
        hidden = "f => f.firstChild.getBoundingClientRect().height - f.getBoundingClientRect().height"
        assert max(browser.js(f"[...document.querySelectorAll('.photo')].map({hidden})")) < 1
    finally:
        browser.send("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("theme", ["", "dark", "light"])
def test_the_appearance_can_be_chosen(browser: Browser, report: Path, theme: str) -> None:
    browser.open(report)
    browser.choose("theme", theme)
    background = browser.js("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 22, 21)" if theme == "dark" else "rgb(251, 251, 249)")


def axe() -> Path | None:
    given = os.environ.get("AXE_CORE")
    candidates = [Path(given)] if given else []
    candidates.append(Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js")
    return next((path for path in candidates if path.is_file()), None)


@pytest.mark.slow
@pytest.mark.skipif(axe() is None, reason="axe-core is not here: npm install axe-core, or AXE_CORE=.../axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(browser: Browser, report: Path, scheme: str, width: int) -> None:
    script = axe()
    assert script is not None
    browser.send("Page.setBypassCSP", enabled=True)
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        browser.open(report, width=width)
        browser.js(script.read_text(encoding="utf-8") + "; 0")
        for state in ("grid", "sheet", "help"):
            if state == "grid":
                browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
            elif state == "sheet":
                browser.js("document.querySelector('h3 a').click()")
            else:
                browser.key("Escape")
                browser.js("document.getElementById('show-help').click()")
            browser.settle()
            assert browser.js("axe.run().then(r => r.violations.map(v => [v.id, v.impact, v.nodes[0].html]))") == [], (
                state
            )
    finally:
        browser.send("Page.setBypassCSP", enabled=False)
        browser.send("Emulation.setEmulatedMedia", features=[])


@pytest.mark.slow
def test_ten_thousand_images_can_be_looked_through(browser: Browser, tmp_path: Path, make_record: Any) -> None:
    record = make_record(SIZE)
    with ReportWriter(tmp_path / "report.html", title="Run", facts=[], pictures="files") as writer:
        for i in range(10_000):
            writer.add({**record, "image": f"birds/{i:05}.jpg", "margin": (i * 7919 % 10_000) / 10_000}, None)
    browser.open(tmp_path / "report.html")
    assert found(browser) == "10,000 images, 1 to 48 here"
    assert browser.js("document.querySelectorAll('#cards article').length") == 48
    browser.choose("search", "birds/0999")
    assert found(browser) == "10 images of 10,000"
    browser.js("location.hash = '#i=9999'")
    browser.settle()
    assert is_open(browser) == "birds/09999.jpg"
