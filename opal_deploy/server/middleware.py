"""Around every request: who may send it, its id, its log line and its metrics."""

from __future__ import annotations

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
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opal_deploy.server.models import ServerState

_REQUEST_ID = "X-Request-ID"
_ID = re.compile(r"[\x21-\x7e]{1,128}")
# https://www.w3.org/TR/trace-context
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}.*")
_HEALTH = ("/v2/health/live", "/v2/health/ready")
# health and the page that asks for the token need no token
_OPEN = ("/", "/page.css", "/page.js", "/evidence.js")
# load balancers and Prometheus poll these: logged only when they fail
_QUIET = ("live", "ready", "model_ready", "metrics")


class RequestMiddleware:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        self._own = frozenset({"localhost", state.options.host.lower()})
        self._allowed = frozenset(name.lower() for name in state.options.allowed_host)

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

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer[_REQUEST_ID], answer["X-Content-Type-Options"] = request_id, "nosniff"
                if self._state.problem:
                    answer["Connection"] = "close"
            await send(message)

        start = time.perf_counter()
        try:
            await (self._refuse(scope, headers) or self._app)(scope, receive, send_with_headers)
        except Exception:  # a bug, which has been answered with 500
            for line in traceback.format_exc().splitlines():
                self._state.log.message(line, "error")
        finally:
            self._account(scope, status, request_id, time.perf_counter() - start)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the response to a request that may not be answered, else None."""
        # below the path at which another application mounted this one
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _HEALTH:
            return None
        if self._state.token is None:
            problem = find_foreign(headers, self._own, self._allowed)
            return JSONResponse({"error": problem}, HTTPStatus.FORBIDDEN) if problem else None
        # a page of another site cannot know the token
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # takes the same time for every token
        is_expected = hmac.compare_digest(token.strip().encode(), self._state.token.encode())
        if path in _OPEN or (is_expected and scheme.lower() == "bearer"):
            return None
        reason = {"error": "expected a bearer token: Authorization: Bearer TOKEN"}
        return JSONResponse(reason, HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})

    def _account(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        route = getattr(scope.get("endpoint"), "__name__", "unknown")
        state = scope.get("state", {})
        model = state.get("model", "")
        self._state.metrics.requests.labels(route, model, str(status)).inc()
        self._state.metrics.request_seconds.labels(route, model).observe(seconds)
        if route in _QUIET and status == HTTPStatus.OK:
            return
        fields = {
            "method": scope["method"], "path": scope["path"][:200], "status": status, "ms": round(seconds * 1e3, 1)
        }  # fmt: skip
        fields |= {name: state[name] for name in ("model", "images") if name in state}
        if trace := _TRACE.fullmatch(Headers(scope=scope).get("traceparent", "")):
            fields |= {"trace": trace[1], "span": trace[2]}
        self._state.log.request(fields | {"id": request_id})


def find_foreign(headers: Headers, own: frozenset[str], allowed: frozenset[str]) -> str:
    """Return why a request does not come from a user of this server, or an empty string.

    A browser lets any page send requests to any address. A page whose name was pointed at this machine after it loaded
    (DNS rebinding) even reads the answers. Such requests carry the other page's name as their Host or Origin. A Host
    must be an IP address, which cannot be pointed elsewhere, or the server's own or an allowed name; `*` allows any.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if "*" in allowed:
        return ""
    if host and not _is_address(name := _name(f"//{host}")) and name not in own | allowed:
        problem = f"host {host[:80]!r} is not this server's"
    elif origin is not None and origin.partition("://")[2] != host and _name(origin) not in allowed:
        problem = f"a page of {origin[:80]!r} may not use this server"
    else:
        return ""
    return f"{problem}; start it with --allowed-host NAME, or with a token"


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(name))
    return False


def _name(url: str) -> str:
    """Return the name or address in a URL in lower case, without a port; empty where there is none."""
    with suppress(ValueError):
        return (urlsplit(url).hostname or "").rstrip(".")
    return ""
