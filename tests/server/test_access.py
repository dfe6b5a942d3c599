"""Who is answered: clients with the token, and without one no page of another site."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
from playwright.sync_api import sync_playwright

from tests.bright import BrightSession
from tests.browser import CHROMIUM, needs_chromium


@pytest.fixture(scope="module")
def foreign(serving: Callable) -> Iterator[tuple[Any, Any]]:
    with (
        serving({"light": BrightSession()}, limits={"allowed_host": ("example.org",)}) as open_server,
        serving({"light": BrightSession()}, token="s3cret") as locked,
    ):
        yield open_server, locked


def test_a_token_opens_everything_and_health_is_open(foreign: tuple[Any, Any]) -> None:
    with httpx.Client(base_url=foreign[1].url) as client:
        assert client.get("/v2/health/live").status_code == client.get("/v2/health/ready").status_code == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
            for path in ("/v2/models/light", "/metrics", "/none"):
                refused = client.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
        assert client.get("/v2/models/light", headers={"Authorization": "Bearer s3cret"}).status_code == 200


OWN = {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Host": "localhost:8000"}, 200, id="loopback"),
        pytest.param({"Host": "[::1]:8000"}, 200, id="an address"),
        pytest.param({"Host": "Example.org:80"}, 200, id="allowed"),
        pytest.param({"Host": "localhost:8000", **OWN}, 200, id="its own page"),
        pytest.param({"Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"}, 200, id="an allowed page"),
        pytest.param({"Host": "rebound.test"}, 403, id="a name pointed here"),
        pytest.param({"Host": "rebound.test", "Origin": "http://rebound.test"}, 403, id="a page of that name"),
        pytest.param({"Host": "localhost.rebound.test"}, 403, id="a name that begins like ours"),
        pytest.param({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, 403, id="another port"),
        pytest.param({"Origin": "null"}, 403, id="a page without an origin"),
        pytest.param({"Origin": "http://["}, 403, id="an origin that is none"),
        pytest.param({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403, id="marked by the browser"),
    ],
)
def test_without_a_token_only_this_servers_names_are_answered(
    foreign: tuple[Any, Any], headers: dict[str, str], status: int
) -> None:
    open_server, locked = foreign
    refused = httpx.get(f"{open_server.url}/metrics", headers=headers)
    assert refused.status_code == status
    assert status == 200 or "--allowed-host NAME" in refused.json()["error"]
    # a load balancer asks by any name, and who has the token is no stranger
    assert httpx.get(f"{open_server.url}/v2/health/live", headers=headers).status_code == 200
    authorized = {**headers, "Authorization": "Bearer s3cret"}
    assert httpx.get(f"{locked.url}/metrics", headers=authorized).status_code == 200


class OtherSite(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.browser
@needs_chromium
def test_a_page_of_another_site_makes_no_local_server_work(serving: Callable) -> None:
    session = BrightSession()
    with (
        serving({"light": session}) as running,
        HTTPServer(("127.0.0.1", 0), OtherSite) as other,
        sync_playwright() as playwright,
    ):
        Thread(target=other.serve_forever).start()
        session.batches.clear()
        port, rebound = other.server_port, f"http://rebound.test:{running.host.split(':')[1]}"
        resolve = "--host-resolver-rules=MAP *.test 127.0.0.1"
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", resolve])
        page = browser.new_page()
        statuses: dict[str, int] = {}
        page.on("response", lambda response: statuses.__setitem__(response.url, response.status))
        page.goto(f"http://attack.test:{port}")
        page.evaluate(
            "url => fetch(url, {method: 'POST', mode: 'no-cors', body: 'image'}).then(() => 0, () => 0)",
            f"{running.url}/explain",
        )
        # the page's own name now means this machine
        page.goto(rebound)
        assert "--allowed-host" in page.inner_text("body")
        # a link to the server's own page is followed
        page.goto(f"http://attack.test:{port}")
        page.evaluate("url => { location.href = url }", running.url)
        page.wait_for_url(f"{running.url}/")
        assert page.locator("#file").count() == 1
        browser.close()
        other.shutdown()
    assert statuses[f"{running.url}/explain"] == statuses[f"{rebound}/"] == 403
    assert statuses[f"{running.url}/"] == 200
    assert session.batches == []
