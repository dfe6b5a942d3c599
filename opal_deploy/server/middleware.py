"""Around every request: who may send it, its id, log line and metrics, and how its connection ends."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import traceback
import uuid
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opal_deploy.server.admission import error_response
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import ServeOptions

_REQUEST_ID = "X-Request-ID"
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HEALTH = ("/v2/health/live", "/v2/health/ready")
# health, the page that asks for the token, and the list of addresses need no token
_OPEN = (*_HEALTH, "/", "/page.css", "/page.js", "/evidence.js", "/docs", "/openapi.json")
# names and values of the headers, path and query
MAX_HEAD_BYTES = 32 << 10
# load balancers and Prometheus poll these: logged only when they fail
_QUIET = ("live", "ready", "model_ready", "metrics")
# reading and discarding the rest of a body lets a client that is still sending receive the response
_DISCARD_SECONDS = 2.0
_SAFE_METHODS = ("GET", "HEAD")


class RequestMiddleware:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        # a web page elsewhere cannot know the token
        self._hosts = None if state.token is not None else AllowedHosts(state.options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(_REQUEST_ID, "")
        request_id = request_id if _ID.fullmatch(request_id) else uuid.uuid4().hex
        # nginx's number for a client that disconnected before the response
        status = 499
        # a client that expects "100 Continue" has not sent its body
        body_is_read = "expect" in headers

        async def receive_and_note() -> Message:
            nonlocal body_is_read
            message = await receive()
            body_is_read = body_is_read or not message.get("more_body")
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer[_REQUEST_ID], answer["X-Content-Type-Options"] = request_id, "nosniff"
                if self._state.problem:
                    answer["Connection"] = "close"
                # after a timeout the client gets no more time
                if answer.get("connection") == "close" and status != HTTPStatus.REQUEST_TIMEOUT:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_DISCARD_SECONDS):
                            while not body_is_read:
                                await receive_and_note()
            await send(message)

        metrics, start = self._state.metrics, time.perf_counter()
        metrics.in_progress.inc()
        try:
            await (self._refuse(scope, headers) or self._app)(scope, receive_and_note, send_with_headers)
        except Exception:  # a bug, which has been answered with 500
            for line in traceback.format_exc().splitlines():
                self._state.log.message(line, "error")
        finally:
            metrics.in_progress.dec()
            self._account(scope, status, request_id, time.perf_counter() - start)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the response to a request that may not be answered, else None."""
        # below the path at which another application mounted this one
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        head = len(scope["path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
        if head > MAX_HEAD_BYTES:
            reason = f"a head of {head:,} bytes found; expected at most {MAX_HEAD_BYTES:,}"
            return error_response(431, reason, {"Connection": "close"})
        if path in _HEALTH:
            return None
        if self._hosts is not None:
            foreign = self._hosts.find_problem(scope["method"], headers)
            return error_response(403, foreign) if foreign else None
        if path in _OPEN or self._is_authorized(headers):
            return None
        reason = "expected a bearer token: Authorization: Bearer TOKEN"
        return error_response(401, reason, {"WWW-Authenticate": "Bearer"})

    def _is_authorized(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # takes the same time for every token
        same = hmac.compare_digest(token.strip().encode(), (self._state.token or "").encode())
        return same and scheme.lower() == "bearer"

    def _account(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        route = getattr(scope.get("endpoint"), "__name__", "unknown")
        known = scope.get("state", {})
        model = known.get("model", "")
        self._state.metrics.requests.labels(route, model, str(status)).inc()
        self._state.metrics.request_seconds.labels(route, model).observe(seconds)
        if route in _QUIET and status == HTTPStatus.OK:
            return
        fields = {
            "method": scope["method"], "path": scope["path"][:200], "status": status, "ms": round(seconds * 1e3, 1)
        }  # fmt: skip
        fields |= {name: known[name] for name in ("model", "images", "code") if name in known}
        self._state.log.request(fields | {"id": request_id})


class AllowedHosts:
    """The names in Host and Origin that are answered without a token: the server's own, and any IP address.

    A browser lets any page send requests to any address. A page whose name was pointed at this machine after it loaded
    (DNS rebinding) even reads the answers. Such requests carry the other page's name as their Host or Origin.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._allowed = {name.lower() for name in options.allowed_host}
        self._names = {"localhost", options.host.lower(), *self._allowed}

    def find_problem(self, method: str, headers: Headers) -> str:
        """Return why a request may not be answered, or an empty string."""
        if "*" in self._allowed:
            return ""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_ours(_name(f"//{host}")):
            problem = f"host {host[:80]!r} is not this server's"
        elif origin is not None:
            if origin.partition("://")[2] == host or _name(origin) in self._allowed:
                return ""
            problem = f"a page of {origin[:80]!r} may not use this server"
        elif headers.get("sec-fetch-site") == "cross-site":
            # a link to the page is no risk: only the page sees the answer
            if method in _SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate":
                return ""
            problem = "a page of another site may not use this server"
        else:
            return ""
        return f"{problem}; start it with --allowed-host NAME, or with a token"

    def _is_ours(self, name: str) -> bool:
        with suppress(ValueError):
            # an address cannot be pointed elsewhere
            return bool(ip_address(name))
        return name in self._names or name.endswith(".localhost")


def _name(url: str) -> str:
    """Return the name or address in a URL in lower case, without a port; empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
