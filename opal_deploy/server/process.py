"""The process of `opal-deploy serve`: listens, and shuts down gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from opal_deploy.errors import ExitCode, StoppedEarly, UsageError
from opal_deploy.predict.prepare import raise_pillow_limit
from opal_deploy.predict.setup import find_default_model, load_model
from opal_deploy.server.app import create_app
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import ServeOptions, read_token

# for the head of a request to arrive, even the first one of a connection and after each answer
_HEAD_SECONDS = 10.0
# names and values of the headers, path and query; Granian answers 431 to more
_MAX_HEAD_BYTES = 64 << 10
# while the server is not ready, before it stops listening: for requests already on their way
_LAST_CALL_SECONDS = 0.5
# for clients to read their answers once the server stops
_READ_SECONDS = 30.0
_POLL_SECONDS = 0.05
_STOPPING = "the server is stopping"


def serve_models(models: Mapping[str, Path], options: ServeOptions) -> None:
    """Serve models by name until SIGTERM or Ctrl-C; without a name, the model that `infer` would find.

    Raises:
        UsageError: no model is found, or the address, the token, the key or an option cannot be used.
        ArtifactError: a model file does not exist or is damaged.
        StoppedEarly: a device was lost.
    """
    raise_pillow_limit(options.max_pixels)
    state = ServerState(options, token=read_token(options.token_file))
    log = state.log.message
    with contextlib.ExitStack() as stack:
        # before the models are loaded, which may take minutes
        placeholder = stack.enter_context(bind(options.host, options.port))
        # as many connections, which are files, as the system allows
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if not models:
            default = find_default_model(options.device, options.runtime, log, option="opal-deploy serve FILE")
            models = {default.stem: default}
        stack.callback(state.close)
        for name, path in models.items():
            model = load_model(path, device=options.device, threads=options.threads, runtime=options.runtime, log=log)
            served = state.load(name, path, model.sessions, model.fingerprint["sha256"])
            log(f"{name}: {path} in {served.session.description}, batches of {served.options.batch}")
        if state.token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
            log("Anyone who can reach this address can send requests: set --token-file, or use an authenticating proxy")
        if state.signer is not None:
            log(f"Signing records with the key {state.signer.fingerprint}")
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{placeholder.getsockname()[1]}"
        header = "" if state.token is None else ' --header "Authorization: Bearer $TOKEN"'
        hints = f"Listening on {address}", f"  curl --data-binary @IMAGE{header} {address}/explain"
        run_server(state, placeholder, lambda: [log(hint) for hint in hints])


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds the address; raise UsageError if it is in use, or not one of this machine."""
    placeholder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        placeholder.bind((host, port))
    except OSError as error:
        placeholder.close()
        reason = f"cannot listen there ({error.strerror or error}); choose another address"
        raise UsageError(f"--host {host} --port {port}: {reason}") from None
    return placeholder


def run_server(state: ServerState, placeholder: socket.socket, announce: Callable[[], object] = lambda: None) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish those in flight; raise StoppedEarly for a lost device."""

    def stop(number: int, frame: FrameType | None) -> None:
        if state.stopping:
            state.log.message("Stopping at once")
            os._exit(ExitCode.INTERRUPTED)
        state.stopping, state.problem = True, state.problem or _STOPPING
        state.log.message("Stopping after the requests in flight; stop again to end at once")

    # not the event loop's handlers, which Windows lacks, and which a loop that hangs would never call
    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(serve_app(state, placeholder, announce))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if state.failed:
        raise StoppedEarly(state.problem)


async def serve_app(state: ServerState, placeholder: socket.socket, announce: Callable[[], object]) -> None:
    """Answer requests at the address of a socket, which is closed, until the state is `stopping` or `failed`.

    `announce` is called once the server listens. Requests in flight are answered before the end.
    """
    options, (host, port) = state.options, placeholder.getsockname()[:2]
    placeholder.close()
    server = Server(
        create_app(state), host, port, interface=Interfaces.ASGINL, http=HTTPModes.http1, websockets=False,
        log_enabled=False, backlog=1024, backpressure=options.max_connections,
        http1_settings=HTTP1Settings(header_read_timeout=int(_HEAD_SECONDS * 1e3), max_buffer_size=_MAX_HEAD_BYTES),
    )  # fmt: skip
    serving = asyncio.create_task(server.serve())
    while not serving.done():
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            break
        await asyncio.sleep(_POLL_SECONDS)
    announce()
    while not (state.stopping or state.failed or serving.done()):
        await asyncio.sleep(_POLL_SECONDS)
    state.problem = state.problem or _STOPPING
    # idle connections get their last answer, and those that arrive learn that the server is not ready
    await asyncio.sleep(0 if state.failed else max(options.drain, _LAST_CALL_SECONDS))
    server.stop()
    await asyncio.wait({serving}, timeout=options.upload_timeout + options.request_timeout + _READ_SECONDS)
    if serving.done():
        serving.result()
