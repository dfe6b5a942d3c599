"""The documentation as `make docs` builds it, opened from disk in a real browser."""

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser import needs_chromium, open_browser

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.browser, needs_chromium]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def open_page(site):
    """Opens a page of the site by its file, in a window of a width; nothing may be requested from a network."""
    with open_browser() as browser:

        def open_page(name, width):
            context = browser.new_context(viewport={"width": width, "height": 800}, offline=True)
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            page = context.new_page()
            page.set_default_timeout(10_000)
            page.goto((site / name).as_uri())
            return page

        yield open_page


@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_finds_a_page_and_no_code_of_the_home_page_is_cut_off(open_page, width):
    page = open_page("index.html", width)
    for code in page.locator("pre > code").all():
        assert code.evaluate("code => code.scrollWidth <= code.clientWidth")
    if width == 390:
        page.locator("label[for=__search]").first.click()
    page.locator(".md-search__input").press_sequentially("calibrated")
    result = page.locator(".md-search-result__link", has_text="Calibrated probabilities").first
    result.click()
    expect(page).to_have_title("Calibrated probabilities - opal-deploy")


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        ("howto/calibration.html", "opal-deploy train DATA --out runs/mine\nopal-deploy export runs/mine/best.pt"),
        ("howto/python.html", "from pathlib import Path"),
    ],
)
def test_copied_code_has_no_prompts_and_no_output(open_page, name, copied):
    page = open_page(name, 1280)
    page.locator(".md-code__button").first.click()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.startswith(copied)
    assert "$ " not in text
    assert "temperature" not in text


def test_placeholders_of_help_texts_are_shown(site):
    text = (site / "reference/cli.html").read_text("utf-8")
    assert "DATA/train/&lt;class&gt; ..." in text
    assert "runs/&lt;name of DATA&gt;" in text
    assert "<code>--out &lt;path&gt;</code>" in text
