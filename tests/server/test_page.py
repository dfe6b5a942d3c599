"""The page for people, in a real browser."""

import httpx
import pytest
from playwright.sync_api import expect

from tests.bright import BrightSession
from tests.browser import AXE, find_violations, open_browser

NAME = "<img src=x onerror=hit()>.png"
DROP = """([name, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.mark.browser
def test_a_dropped_picture_is_explained(serving, exact_session, make_pictures, tmp_path):
    data = make_pictures(tmp_path, 1)[0].read_bytes()
    problems, elsewhere = [], []
    with (
        serving({"trees": exact_session, "light": BrightSession()}, token="s3cret") as running,
        open_browser() as browser,
    ):
        page = browser.new_page(viewport={"width": 360, "height": 800}, bypass_csp=True)
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
    assert 'data-noun="slot"' in answers[""].text
    assert "http" not in answers[""].text.replace("<!doctype html>", "")
