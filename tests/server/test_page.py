"""The page for people, in a real browser."""

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from playwright.sync_api import expect, sync_playwright

from opal_deploy.server.app import create_app
from tests.bright import BrightSession
from tests.browser import AXE, CHROMIUM, find_violations, needs_chromium

NAME = "<img src=x onerror=hit()>.png"
DROP = """([name, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", [1280, 360])
def test_a_dropped_picture_is_explained(serving, exact_session, make_pictures, tmp_path, browser, width):
    data = make_pictures(tmp_path, 1)[0].read_bytes()
    problems = []
    elsewhere = []
    with (
        serving({"trees": exact_session, "light": BrightSession()}, token="s3cret") as running,
        browser.new_context(viewport={"width": width, "height": 800}, bypass_csp=True) as context,
    ):
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: elsewhere.append(request.url))
        page.goto(running.url)
        page.evaluate(DROP, [NAME, [*data]])
        expect(page.locator("#status.alert")).to_have_text(f"{NAME}: this server requires a token")
        # by keys alone
        expect(page.locator("#token")).to_be_focused()
        page.keyboard.type("s3cret")
        page.keyboard.press("Enter")
        image = page.locator("#image")
        expect(image).to_be_visible()
        record = httpx.post(f"{running.url}/explain", content=data, headers={"Authorization": "Bearer s3cret"}).json()
        # one of the class names would be markup too
        expect(page.locator("#label")).to_have_text(record["prediction"]["label"])
        size = image.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])")
        assert size == [record["width"], record["height"]]
        tags = page.locator("#boxes text, #slots .tag").all_text_contents()
        assert sorted(tags) == sorted(2 * [str(slot["slot"]) for slot in record["evidence"]])
        page.locator("#slots tbody tr").first.hover()
        expect(page.locator("#boxes .box.faded")).to_have_count(len(record["evidence"]) - 1)
        page.locator("#sheet").click()
        sheet = page.locator("#drawing")
        expect(sheet).to_be_visible()
        assert sheet.evaluate("image => image.decode().then(() => image.naturalWidth)") == (
            1200 if width > 640 else 910
        )
        if AXE.is_file():
            assert find_violations(page) == []
        assert record["prediction"]["label"] in (image.get_attribute("alt") or "")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#file").set_input_files(
            {"name": "cut.png", "mimeType": "image/png", "buffer": data[:200]}  # type: ignore[arg-type]
        )
        expect(page.locator("#status.alert")).to_contain_text("cut.png: ")
        expect(page.locator("#answer")).to_be_hidden()
    assert [text for text in problems if "Failed to load resource" not in text] == []
    assert [url for url in elsewhere if not url.startswith((running.url, "blob:", "data:"))] == []


def test_the_page_allows_nothing_from_elsewhere(serving):
    with serving({"light": BrightSession()}) as running:
        answers = {path: httpx.get(f"{running.url}/{path}") for path in ("", "page.css", "page.js")}
    for answer in answers.values():
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "http" not in answers[""].text.replace("<!doctype html>", "")


def test_a_wrong_address_is_answered_with_what_works(serving, exact_session, make_pictures, tmp_path):
    data = make_pictures(tmp_path, 1)[0].read_bytes()
    with serving({"trees": exact_session}) as running:
        for method, path, status in [("POST", "/predict", 404), ("GET", "/explain", 405), ("GET", "/nope", 404)]:
            response = httpx.request(method, running.url + path)
            assert response.status_code == status
            record, sheet, _ = response.json()["try"]
            assert record == f"curl --data-binary @IMAGE {running.url}/explain"
            assert sheet == f"curl --data-binary @IMAGE '{running.url}/explain?format=sheet' --output sheet.png"
        assert httpx.post(record.split()[-1], content=data).json()["status"] == "ok"
    with serving({"trees": exact_session}, token="s3cret") as running:
        # a client may claim any name, but not any text
        headers = {"Authorization": "Bearer s3cret", "Host": "127.0.0.1'; rm x"}
        lines = httpx.get(f"{running.url}/nope", headers=headers).json()["try"]
        assert "rm x" not in "".join(lines)
        assert '--header "Authorization: Bearer $TOKEN"' in lines[0]
        # below a path that a proxy takes away
        headers |= {"Host": "shop.example", "X-Forwarded-Prefix": "/birds/"}
        lines = httpx.get(f"{running.url}/nope", headers=headers).json()["try"]
        assert lines[0].endswith(" http://shop.example/birds/explain")


def test_the_addresses_are_described_to_programs(serving, exact_session):
    with serving({"trees": exact_session}, token="s3cret") as running:
        document = httpx.get(f"{running.url}/openapi.json").json()
        app = create_app(running.state)
    OpenAPIV31SpecValidator(document).validate()
    # relative to the document
    assert document["servers"] == [{"url": "."}]
    served = {(route.path, *(route.methods - {"HEAD"})) for route in app._app.routes}
    assert served - {(f"/{name}", "GET") for name in ("page.css", "page.js", "evidence.js")} == {
        (path, method.upper())
        for path, methods in document["paths"].items()
        for method in methods.keys() - {"parameters"}
    }


@pytest.mark.browser
@needs_chromium
def test_the_addresses_are_described_to_people(serving, exact_session, browser):
    elsewhere = []
    with (
        serving({"trees": exact_session}) as running,
        browser.new_context(viewport={"width": 360, "height": 800}) as context,
    ):
        page = context.new_page()
        page.on("request", lambda request: elsewhere.append(request.url))
        page.goto(f"{running.url}/docs")
        page.locator("summary", has_text="Explain one image").click()
        expect(page.locator("details[open]")).to_contain_text("record, overlay, sheet, picture")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [url for url in elsewhere if not url.startswith((running.url, "data:"))] == []
