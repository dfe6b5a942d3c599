"""Connections that are held open, too many of them, and requests that pages of other sites send."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
from playwright.sync_api import sync_playwright

from opal_deploy.errors import UsageError
from opal_deploy.server import connections
from opal_deploy.server.connections import RESERVED_CONNECTIONS, choose_max_connections
from opal_deploy.server.telemetry import ServerLog
from tests.bright import BrightSession, wait_until
from tests.browser import CHROMIUM, needs_chromium

CHUNKED = b"Transfer-Encoding: chunked"
ANNOUNCED = b"Content-Length: 1000000"


@pytest.fixture(scope="module")
def server(serving: Callable) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "_LINGER_SECONDS", 0.3)
        with serving({"light": BrightSession()}, limits={"upload_timeout": 0.5}) as running:
            yield running


def connect(running: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(running.host.split(":")[1])), 20)


def until_closed(client: socket.socket, piece: bytes) -> float:
    """Return the seconds for which the server takes one piece after another."""
    start = time.monotonic()
    while time.monotonic() < start + 20:
        try:
            client.sendall(piece)
        except OSError:
            break
        time.sleep(0.05)
    return time.monotonic() - start


@pytest.mark.parametrize("length", [ANNOUNCED, CHUNKED])
@pytest.mark.parametrize(("path", "status"), [(b"/explain", b"408"), (b"/nope", b"404"), (b"/metrics", b"405")])
def test_no_connection_outlives_the_time_for_its_body(server: Any, path: bytes, status: bytes, length: bytes) -> None:
    with connect(server) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (path, length))
        assert until_closed(client, b"1\r\nx\r\n" if length is CHUNKED else b"x") < 20
    with connect(server) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (path, length))
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 %b " % status)


@pytest.mark.parametrize(("size", "status"), [(30 << 10, b"200"), (33 << 10, b"431")])
@pytest.mark.parametrize("piece", [4 << 10, 64 << 10], ids=["in pieces", "at once"])
def test_the_limit_of_a_head_does_not_depend_on_its_pieces(server: Any, piece: int, size: int, status: bytes) -> None:
    head = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"x" * size + b"\r\n\r\n"
    with connect(server) as client:
        for start in range(0, len(head), piece):
            client.sendall(head[start : start + piece])
            time.sleep(0.02)
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 %b " % status)


LONG = b"x" * 70_000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param((b"1;" + LONG + b"\r\nx\r\n0\r\n\r\n",), 400, id="an extension at once"),
        pytest.param((b"1;" + LONG[:40_000], LONG[:40_000] + b"\r\nx\r\n0\r\n\r\n"), 400, id="in two pieces"),
        pytest.param((b"1;%b\r\nx\r\n" % LONG[:9_000] * 9 + b"0\r\n\r\n",), 400, id="many extensions"),
        pytest.param((b"1\r\nx\r\n0\r\nX: " + LONG + b"\r\n\r\n",), 400, id="a trailer"),
        pytest.param((b"1\r\nx\r\n" * 15_000 + b"0\r\n\r\n",), None, id="chunks of one byte"),
        pytest.param((b"no size\r\n",), 400, id="no chunk"),
    ],
)
def test_a_body_of_chunk_extensions_is_refused_in_one_line(
    serving: Callable, capsys: pytest.CaptureFixture[str], body: tuple[bytes, ...], status: int | None
) -> None:
    with serving({"light": BrightSession()}, log=ServerLog("json")) as running:
        for path, own in ((b"/explain", 415), (b"/nope", 404)):
            head = b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (path, CHUNKED)
            for pieces in ((head + body[0], *body[1:]), (head, *body)):
                with connect(running) as client:
                    for piece in pieces:
                        client.sendall(piece)
                        time.sleep(0.1)
                    found = int(client.makefile("rb").readline().split()[1])
                # an unknown path may be answered before its body is read: 64 KiB a read, so one piece can be two
                assert found in ({status or own, own} if path == b"/nope" else {status or own})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    messages = {line["message"] for line in lines if line["event"] == "message"}
    assert messages <= {"Invalid HTTP request received."}


def test_connections_over_the_limit_are_refused_and_health_is_answered(
    serving: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serving({"light": BrightSession()}, limits={"max_connections": 3}, log=ServerLog("json")) as running,
        ExitStack() as held,
    ):
        for _ in range(3):
            held.enter_context(connect(running))
        for _ in range(2):
            refused = httpx.get(f"{running.url}/v2/models/light")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.headers["connection"] == "close"
            assert httpx.get(f"{running.url}/v2/health/live").status_code == 200
        for _ in range(RESERVED_CONNECTIONS):
            held.enter_context(connect(running))
        with connect(running) as dropped:
            # not even told why
            assert dropped.recv(1) == b""
        held.close()
        wait_until(lambda: httpx.get(f"{running.url}/v2/models/light").status_code == 200)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines if line["event"] == "message"] == [
        "3 connections are open, further ones are refused (--max-connections)"
    ]


def test_more_connections_than_descriptors_are_refused() -> None:
    assert choose_max_connections(1) == 1
    with pytest.raises(UsageError, match=r"--max-connections 1000000000: this process may open .* files"):
        choose_max_connections(1_000_000_000)


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
    serving: Callable, foreign: tuple[Any, Any], headers: dict[str, str], status: int
) -> None:
    open_server, locked = foreign
    refused = httpx.get(f"{open_server.url}/metrics", headers=headers)
    assert refused.status_code == status
    assert status == 200 or "--allowed-host NAME" in refused.json()["error"]
    # a load balancer asks by any name, and who has the token is no stranger
    assert httpx.get(f"{open_server.url}/v2/health/live", headers=headers).status_code == 200
    authorized = {**headers, "Authorization": "Bearer s3cret"}
    assert httpx.get(f"{locked.url}/metrics", headers=authorized).status_code == 200


@pytest.fixture(scope="module")
def foreign(serving: Callable) -> Iterator[tuple[Any, Any]]:
    with (
        serving({"light": BrightSession()}, limits={"allowed_host": ("example.org",)}) as open_server,
        serving({"light": BrightSession()}, token="s3cret") as locked,
    ):
        yield open_server, locked


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
