"""Connections of the server: how many may be open, and how long a client may take to send and to read."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from opal_deploy.errors import UsageError

# seconds for the head of a request to arrive
_HEAD_SECONDS = 10.0
_CROWDED_HEAD_SECONDS = 1.0
# for a client to read why it was refused
_LINGER_SECONDS = 2.0
# for a client to read what fills the send buffers
READ_SECONDS = 30.0
# connections over the limit that are still told why, or asked for the server's health
RESERVED_CONNECTIONS = 32
# descriptors for models, worker processes and drawings
_OTHER_DESCRIPTORS = 160
_MOST_CONNECTIONS = 10_000
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# between two lines about the same problem
_REPORT_SECONDS = 60.0
# a scope's state has this key where the connection is over the limit
CROWDED = "crowded"
# bytes of chunk sizes, extensions and trailers per byte of body: a chunk of one byte needs five
_MOST_FRAMING = 16


def choose_max_connections(requested: int | None) -> int:
    """Return how many connections may be open; by default as many as the limit of open files allows, up to 10,000.

    Raises:
        UsageError: the limit of open files allows fewer than `requested`.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return requested or _MOST_CONNECTIONS
    most = descriptors - len(os.listdir("/dev/fd")) - _OTHER_DESCRIPTORS - RESERVED_CONNECTIONS
    if requested is not None and requested > most:
        raise UsageError(
            f"--max-connections {requested}: this process may open {descriptors} files, which allows "
            f"{max(most, 0)} connections; give fewer, or raise the limit (ulimit -n)"
        )
    if most < 1:
        raise UsageError(f"this process may open only {descriptors} files; raise the limit (ulimit -n)")
    return requested or min(most, _MOST_CONNECTIONS)


class ConnectionLimit:
    """The limit that all connections of a server share, and the seconds that a body may take.

    Attributes:
        most: connections that are served; `RESERVED_CONNECTIONS` more are only answered with 503 or their health.
        body_seconds: from the end of a request's head to the end of its body.
    """

    def __init__(self, most: int, body_seconds: float, log: Callable[[str], None]) -> None:
        self.most, self.body_seconds = most, body_seconds
        self._log = log
        self._next_report = 0.0

    def report(self, problem: str) -> None:
        """Write a line about connections, at most one per minute."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            self._log(problem)

    def handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report what asyncio cannot raise: it calls this a thousand times per second when descriptors run out."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
            self.report(f"no connection can be accepted: {error.strerror}; use fewer --max-connections")
        else:
            loop.default_exception_handler(context)


class _BoundedConnection(h11.Connection):
    """The server's side of HTTP/1.1, which refuses chunked bodies that consist of extensions and trailers.

    h11 itself limits these only while they are incomplete, so they pass if they arrive at once.

    Args:
        most_bytes: of a request without its body, in addition to `_MOST_FRAMING` times the size of the body.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self._most_bytes = most_bytes
        self._excess = 0

    def receive_data(self, data: bytes) -> None:
        self._excess += len(data)
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        excess = 0
        if isinstance(event, h11.Data):
            self._excess -= (1 + _MOST_FRAMING) * len(event.data)
        elif isinstance(event, h11.EndOfMessage):
            next_request = len(self.trailing_data[0])
            excess, self._excess = self._excess - next_request, next_request
        elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
            excess = self._excess
        if excess > self._most_bytes:
            raise h11.RemoteProtocolError("too many bytes of chunk extensions and trailers")
        return event


class HttpProtocol(H11Protocol):
    """uvicorn's protocol, with a limit on connections and deadlines for a request's head, its body and its reader."""

    def __init__(self, *arguments: Any, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _BoundedConnection(self.config.h11_max_incomplete_event_size or 0)
        self._limit = limit
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limit.most:
            self._limit.report(f"{self._limit.most} connections are open, further ones are refused (--max-connections)")
            self.app_state = {**self.app_state, CROWDED: True}
        if len(self.connections) > self._limit.most + RESERVED_CONNECTIONS:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if not self._refused:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP as JSON, unless the request has its answer, and leave the client time to read it."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = f"{msg.rstrip('.')} (not HTTP/1.1, or too large a head, chunk extension or trailer)"
            body = json.dumps({"error": problem}).encode()
            headers = [
                ("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close"),
            ]  # fmt: skip
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            # the application's answer, if it is still to come, has no place after this one
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # closing a connection with unread bytes would reset it, and the client would lose the answer
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._body_timer, self._read_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _watch(self) -> None:
        """Run the timer for the part that the client has yet to send: the head, the body, or nothing."""
        state = self.conn.their_state
        head_seconds = _CROWDED_HEAD_SECONDS if CROWDED in self.app_state else _HEAD_SECONDS
        self._head_timer = self._run(self._head_timer, state is h11.IDLE, head_seconds)
        # the application's own deadline comes first, and has an answer
        self._body_timer = self._run(
            self._body_timer, state is h11.SEND_BODY, self._limit.body_seconds + _LINGER_SECONDS
        )

    def _run(self, timer: asyncio.TimerHandle | None, wanted: bool, seconds: float) -> asyncio.TimerHandle | None:
        if wanted:
            return timer or self.loop.call_later(seconds, self.transport.close)
        if timer is not None:
            timer.cancel()
        return None
