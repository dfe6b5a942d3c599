"""The process of `opal-deploy serve`: listens, and shuts down gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from opal_deploy.errors import ExitCode, StoppedEarly, UsageError
from opal_deploy.predict.prepare import raise_pillow_limit
from opal_deploy.predict.setup import find_default_model, load_model
from opal_deploy.records.signatures import Signer
from opal_deploy.runtime.devices import default_workers
from opal_deploy.server.app import create_app
from opal_deploy.server.connections import READ_SECONDS, ConnectionLimit, HttpProtocol, choose_max_connections
from opal_deploy.server.middleware import MAX_HEAD_BYTES
from opal_deploy.server.models import ServerState
from opal_deploy.server.openapi import list_uses
from opal_deploy.server.options import ServeOptions, read_token
from opal_deploy.server.telemetry import ServerLog

# seconds for requests already on their way when the server stops listening
_LAST_CALL_SECONDS = 0.5


def serve_models(models: Mapping[str, Path], options: ServeOptions) -> None:
    """Serve models by name until SIGTERM or Ctrl-C; without a name, the model that `infer` would find.

    Raises:
        UsageError: no model is found, or the address, the token, the key or an option cannot be used.
        ArtifactError: a model file does not exist or is damaged.
        StoppedEarly: a device was lost.
    """
    raise_pillow_limit(options.max_pixels)
    state = ServerState(options, token=read_token(options.token_file), log=ServerLog(options.log_format))
    log, workers = state.log.message, options.workers or default_workers()
    signer = None if options.sign is None else Signer(options.sign, log)
    with contextlib.ExitStack() as stack:
        # before the models are loaded, which may take minutes
        listener = stack.enter_context(bind(options.host, options.port))
        if not models:
            default = find_default_model(options.device, options.runtime, log, option="opal-deploy serve FILE")
            models = {default.stem: default}
        for name, path in models.items():
            model = load_model(path, device=options.device, threads=options.threads, runtime=options.runtime, log=log)
            served = state.start(name, path, model.sessions, model.fingerprint["sha256"], signer)
            stack.callback(served.close)
            log(f"{name}: {path} in {model.sessions[0].description}, batches of {served.options.batch}")
        if state.token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
            log("Anyone who can reach this address can send requests: set --token-file, or use an authenticating proxy")
        if signer is not None:
            log(f"Signing records with the key {signer.fingerprint}")
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{host}:{listener.getsockname()[1]}"
        log(f"Listening on http://{address}")
        for line in list_uses(address, has_token=state.token is not None):
            log(f"  {line}")
        run_server(create_app(state, draw_workers=workers), state, listener)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise UsageError if the address is in use, or not one of this machine."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
            return listener
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror or error}); choose another address"
        ) from None


def run_server(app: ASGIApp, state: ServerState, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish those in flight; raise StoppedEarly for a lost device."""
    asyncio.run(Server(app, state).serve([listener]))
    if state.failed:
        raise StoppedEarly(state.problem)


class Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown: it drains, then answers every request that it accepted."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        options = state.options
        self._connections = ConnectionLimit(
            choose_max_connections(options.max_connections), options.upload_timeout, state.log.message
        )
        protocol: Any = functools.partial(HttpProtocol, limit=self._connections)
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            date_header=False, timeout_keep_alive=75, backlog=1024,
            # of a head that arrives in pieces; the middleware limits all of them, with an answer that says so
            h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
            timeout_graceful_shutdown=ceil(options.upload_timeout + options.request_timeout + READ_SECONDS),
        )  # fmt: skip
        super().__init__(config)
        state.log.take_over_libraries()
        self._state, self._drain = state, options.drain
        self._stopping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the event loop: uvicorn would end the process by the signal instead of with 0."""
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
            self._state.log.message("Stopping at once")
            os._exit(ExitCode.INTERRUPTED)
        self._state.log.message("Stopping after the requests in flight; stop again to end at once")
        self._state.problem = self._state.problem or "the server is stopping"
        self._stopping = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        await asyncio.sleep(self._drain)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        asyncio.get_running_loop().set_exception_handler(self._connections.handle_exception)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Stop when uvicorn does, or when a device was lost."""
        return self._state.failed or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for requests on their way over accepted connections, and finish."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST_CALL_SECONDS)
        await super().shutdown(sockets)
