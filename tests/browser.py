"""The browser that tests drive, what npm brings for them (`make ort-web`), and what axe finds on a page."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_NODE_MODULES = Path(__file__).parents[1] / ".ort-web/node_modules"
ORT_WEB = _NODE_MODULES / "onnxruntime-web"
AXE = Path(os.environ.get("AXE_CORE") or _NODE_MODULES / "axe-core/axe.min.js")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
needs_ort_web = pytest.mark.skipif(not ORT_WEB.is_dir(), reason="no ONNX Runtime Web: `make ort-web`")
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: `make ort-web`, or AXE_CORE=.../axe.min.js")


@contextmanager
def open_browser(*flags):
    """Yield a browser; skip the test where none is installed."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking", *flags]
        )
        yield browser
        browser.close()


def serve_folders(page, *folders):
    """Answer the page's requests to http://localhost/ with the files of these folders."""

    def serve(route):
        name = route.request.url.removeprefix("http://localhost/").partition("?")[0] or "index.html"
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        route.fulfill(path=paths[0]) if paths else route.fulfill(status=404)

    page.route("http://localhost/**", serve)


def find_violations(page):
    """Return what axe finds; the page's context has to bypass its content security policy."""
    page.evaluate(AXE.read_text(encoding="utf-8") + "; 0")
    return page.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.impact, v.nodes[0].html]))")
