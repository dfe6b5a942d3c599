"""`opal-deploy serve`: models behind HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.options import CPU_BATCH, GPU_BATCH, default_batch, default_workers
from opal_deploy.errors import UsageError, require
from opal_deploy.storage.urls import is_url, redact

if TYPE_CHECKING:
    from opal_deploy.server.logs import LogFormat

TOKEN_VARIABLE = "OPAL_DEPLOY_TOKEN"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# images in work at a time, in batches
_QUEUED_BATCHES = 8


def serve(
    models: Annotated[
        list[str],
        typer.Argument(help="Exported models: FILE or NAME=FILE; default name: the file's, without suffix."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help=f"Images a forward pass at most; default: {CPU_BATCH}, on a GPU {GPU_BATCH}."),
    ] = None,
    max_wait: Annotated[float, typer.Option(min=0, help="Milliseconds that an image waits for others at most.")] = 5.0,
    queue: Annotated[
        int | None, typer.Option(min=1, help="Images in work at a time, a model; more are refused. Default: 8 batches.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Refuse bodies of more MiB than this.")] = 64,
    upload_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a body must have arrived.")] = 30.0,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request must be answered.")] = 30.0,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests at a time that are read or in work; more are refused.")
    ] = 256,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a token that requests must show; or the variable OPAL_DEPLOY_TOKEN.", show_default=False
        ),
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="The log on stderr: text, json (a line a request each), off (no lines for requests).")
    ] = "text",
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds to go on listening after SIGTERM, not ready: for a balancer to see.")
    ] = 0.0,
    min_margin: Annotated[
        str | None,
        typer.Option(
            help="Mark answers with a smaller margin as abstained, or an error rate such as 5%, as `infer` takes it.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Classes listed in each record.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or GPU numbers such as 0,1.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the runtime; default: all cores.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Images decoded and drawn at a time; default: all cores but two.")
    ] = None,
    decode: Annotated[
        str, typer.Option(help="default: within 1 count of Pillow's pixels; exact: Pillow's; fast: scaled JPEG.")
    ] = "default",
    decode_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that decoding or drawing one image may take.")
    ] = 10.0,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse images with more pixels than this.")] = 100_000_000,
) -> None:
    """Answer requests over HTTP: the Open Inference Protocol, version 2, and a page that explains a dropped picture.

    NAME takes pixels and gives the graph's outputs; NAME_explain takes image files and gives the records of `infer`.
    """
    for package in ("starlette", "uvicorn", "prometheus_client", "python_multipart"):
        require(package, "serve", "serve", pip_name=package.replace("_", "-"))
    from opal_deploy.cli.infer.setup import check_model, fingerprint_model, parse_min_margin
    from opal_deploy.inference.decoding.budget import raise_pillow_limit
    from opal_deploy.inference.types import InferenceOptions
    from opal_deploy.preprocess.decode import parse_decoding
    from opal_deploy.runtime.select import open_sessions
    from opal_deploy.server.app import create_app
    from opal_deploy.server.limits import Limits
    from opal_deploy.server.logs import ServerLog
    from opal_deploy.server.metrics import MetricsTimer
    from opal_deploy.server.models import start_model
    from opal_deploy.server.process import Address
    from opal_deploy.server.process import serve as serve_app
    from opal_deploy.server.state import ServerState

    paths = parse_models(models)
    decoding = parse_decoding(decode)
    address = Address(host, port, drain)
    raise_pillow_limit(max_pixels)
    limits = Limits(max_body << 20, max_requests, upload_timeout, request_timeout)
    state = ServerState(limits, token=read_token(token_file), log=ServerLog(parse_log_format(log_format)))
    with ExitStack() as stack:
        # taken before the models are loaded, which may take minutes
        listener = stack.enter_context(address.bind())
        for name, path in paths.items():
            sessions = open_sessions(path, device=device, threads=threads)
            metadata = sessions[0].metadata
            check_model(path, metadata, explain=False, margin=min_margin is not None, boxed=True, top=top)
            margin = None if min_margin is None else parse_min_margin(min_margin, path, metadata)
            options = InferenceOptions(
                batch=batch or default_batch(sessions[0]), workers=workers or default_workers(),
                max_pixels=max_pixels, decode=decoding, isolate=True, decode_timeout=decode_timeout,
                top=top, min_margin=margin, model_sha256=fingerprint_model(path)["sha256"],
            )  # fmt: skip
            model = start_model(
                name, path, sessions, options, max_wait=max_wait / 1e3,
                capacity=queue or _QUEUED_BATCHES * options.batch, timer=MetricsTimer(state.metrics, name),
                observer=state.observer(name), print_message=state.log.message,
            )  # fmt: skip
            stack.callback(model.close)
            state.add(model)
            state.log.message(f"{name}: {path} in {sessions[0].description}, batches of {options.batch}")
        shown = f"[{host}]" if ":" in host else host
        if state.token is None and host not in ("127.0.0.1", "::1", "localhost"):
            state.log.message("Whoever reaches this address may ask: give --token-file, or put a proxy before it")
        state.log.message(f"Listening on http://{shown}:{listener.getsockname()[1]}")
        serve_app(create_app(state, drawers=workers or default_workers()), state, address, listener)


def parse_log_format(text: str) -> LogFormat:
    """Parse the value of --log-format.

    Raises:
        UsageError: there is no such format.
    """
    from opal_deploy.server.logs import LogFormat

    if text not in list(LogFormat):
        raise UsageError(f"--log-format {text!r}: expected {', '.join(LogFormat)}")
    return LogFormat(text)


def read_token(path: Path | None) -> str | None:
    """Return the token that requests must show: a file's, or that of the variable OPAL_DEPLOY_TOKEN; None for none.

    Raises:
        UsageError: the file cannot be read, or the token is empty or no printable ASCII.
    """
    origin = TOKEN_VARIABLE if path is None else f"--token-file {path}"
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        try:
            token = path.read_text("ascii")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text in ASCII"
            raise UsageError(f"{origin}: cannot be read ({reason})") from None
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise UsageError(f"{origin}: no token; expected one line of printable ASCII")
    return token


def parse_models(models: Sequence[str]) -> dict[str, Path]:
    """Return the paths of the models by name, of arguments FILE and NAME=FILE.

    Raises:
        UsageError: a name cannot be part of an address, two are the same, or a model is named by a URL.
    """
    paths: dict[str, Path] = {}
    for text in models:
        name, equals, file = text.partition("=")
        if not equals or Path(text).exists():
            name, file = Path(text).stem, text
        if is_url(file):
            raise UsageError(f"{redact(text)}: a model is not read from a URL; download it, and give its path")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{text}: {name!r} cannot be a model's name; expected letters, digits, _ . -; give NAME={file}"
            )
        names = {name, f"{name}_explain"}
        if any(names & {other, f"{other}_explain"} for other in paths):
            raise UsageError(f"{text}: there is a model {name!r} already, or its explain model; give NAME={file}")
        paths[name] = Path(file)
    return paths
