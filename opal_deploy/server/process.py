"""The process of `opal-deploy serve`: it listens, and stops in good order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from opal_deploy.errors import ExitCode, StoppedEarly, UsageError
from opal_deploy.server.state import ServerState

# until a connection that sends has sent the head of its request
_HEAD_SECONDS = 10.0
# in which a client may read why it was refused
_LINGER_SECONDS = 2.0
# until a client has read what fills the buffers between it and the server
_READ_SECONDS = 30.0
# for a request that is on its way while the server stops to listen
_LAST_CALL_SECONDS = 0.5


@dataclass(frozen=True)
class Address:
    """Where the server listens, and how it leaves.

    Attributes:
        host, port: 0 for any free port.
        drain: seconds between the wish to stop, told by /v2/health/ready, and the end of listening.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain: float = 0.0

    def bind(self) -> socket.socket:
        """Return a socket that listens.

        Raises:
            UsageError: the address is taken, or not one of this machine.
        """
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with contextlib.ExitStack() as stack:
                listener = stack.enter_context(socket.socket(family, kind))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                stack.pop_all()
                return listener
        except OSError as error:
            raise UsageError(
                f"--host {self.host} --port {self.port}: cannot listen there ({error.strerror or error}); "
                "choose another address"
            ) from None


def serve(app: ASGIApp, state: ServerState, address: Address, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C; then finish those in work, and return.

    Raises:
        StoppedEarly: a device was lost.
    """
    asyncio.run(create_server(app, state, address.drain).serve([listener]))
    if state.failed:
        raise StoppedEarly(state.problem)


def create_server(app: ASGIApp, state: ServerState, drain: float = 0.0) -> Server:
    """Return the server, which does not run yet; see `Address` for `drain`."""
    limits = state.limits
    config = uvicorn.Config(
        app, http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        date_header=False, timeout_keep_alive=75, backlog=1024,
        timeout_graceful_shutdown=ceil(limits.upload_timeout + limits.request_timeout + _READ_SECONDS),
    )  # fmt: skip
    state.log.take_over_libraries()
    return Server(config, state, drain)


class Server(uvicorn.Server):
    """uvicorn's server, which stops as `serve` says."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain: float) -> None:
        super().__init__(config)
        self._state, self._drain = state, drain
        self._stopping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals by the event loop: uvicorn's own way ends the process by the signal, not with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        if self._stopping is not None:
            self._state.log.message("Stopped again: ending at once")
            os._exit(ExitCode.INTERRUPTED)
        self._state.log.message("Stopping: requests in work are finished first (again: end at once)")
        self._state.problem = self._state.problem or "the server stops"
        self._stopping = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        await asyncio.sleep(self._drain)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn; a lost device stops the server too."""
        return self._state.failed or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let connections that were accepted send the request that is on its way, and finish."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST_CALL_SECONDS)
        await super().shutdown(sockets)


class _Protocol(H11Protocol):
    """uvicorn's protocol, which waits no longer than `_HEAD_SECONDS` for the head of a request, and no longer than
    `_READ_SECONDS` for a client that reads nothing of its response.
    """

    _refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as every other error is told, and leave the client time to read that."""
        body = json.dumps({"error": f"{msg.rstrip('.')} (no HTTP/1.1, or a head of too many bytes)"}).encode()
        headers = [
            ("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close"),
        ]  # fmt: skip
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # closed with bytes unread the connection would be reset, and the answer lost
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_head()
        self._forget_read()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(_READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_read()

    def _forget_read(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
