"""`opal-deploy serve`: models behind HTTP."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.errors import UsageError, require
from opal_deploy.server.options import ServeOptions
from opal_deploy.storage.urls import is_url, redact

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def serve(
    models: Annotated[
        list[str],
        typer.Argument(help="Exported models: FILE or NAME=FILE. Default name: the file's, without its suffix."),
    ],
    options: ServeOptions,
) -> None:
    """Serve models over HTTP: the Open Inference Protocol, version 2, and a page that explains a dropped image.

    NAME takes pixels and returns the graph's outputs; NAME_explain takes image files and returns `infer`'s records.
    """
    for package in ("starlette", "uvicorn", "prometheus_client", "python_multipart"):
        require(package, "serve", "serve", pip_name=package.replace("_", "-"))
    serve_models(parse_models(models), options)


# images in flight per model, by default
_QUEUED_BATCHES = 8


def serve_models(models: Mapping[str, Path], options: ServeOptions) -> None:
    """Serve models by name until SIGTERM or Ctrl-C.

    Raises:
        UsageError: the address, the token or an option cannot be used.
        ArtifactError: a model file does not exist or is damaged.
        StoppedEarly: a device was lost.
    """
    from opal_deploy.inference.decoding.budget import raise_pillow_limit
    from opal_deploy.inference.setup import check_model, fingerprint_model, parse_min_margin
    from opal_deploy.inference.types import InferenceOptions
    from opal_deploy.preprocess.decode import parse_decoding
    from opal_deploy.runtime.devices import default_batch, default_workers
    from opal_deploy.runtime.select import open_sessions
    from opal_deploy.server.app import create_app
    from opal_deploy.server.models import ServerState, start_model
    from opal_deploy.server.options import read_token
    from opal_deploy.server.process import bind, run_server
    from opal_deploy.server.telemetry import MetricsTimer, ServerLog

    raise_pillow_limit(options.max_pixels)
    state = ServerState(options, token=read_token(options.token_file), log=ServerLog(options.log_format))
    log, workers = state.log.message, options.workers or default_workers()
    with contextlib.ExitStack() as stack:
        # before the models are loaded, which may take minutes
        listener = stack.enter_context(bind(options.host, options.port))
        for name, path in models.items():
            sessions = open_sessions(path, device=options.device, threads=options.threads)
            metadata, margin = sessions[0].metadata, options.min_margin
            check_model(path, metadata, explain=False, margin=margin is not None, boxed=True, top=options.top, log=log)
            inference = InferenceOptions(
                batch=options.batch or default_batch(sessions[0]), workers=workers,
                max_pixels=options.max_pixels, decode=parse_decoding(options.decode), isolate=True,
                decode_timeout=options.decode_timeout, top=options.top,
                min_margin=None if margin is None else parse_min_margin(margin, path, metadata, log),
                model_sha256=fingerprint_model(path)["sha256"],
            )  # fmt: skip
            served = start_model(
                name, path, sessions, inference, max_wait=options.max_wait / 1e3,
                capacity=options.queue or _QUEUED_BATCHES * inference.batch, timer=MetricsTimer(state.metrics, name),
                observer=state.observer(name), log=log,
            )  # fmt: skip
            stack.callback(served.close)
            state.add(served)
            log(f"{name}: {path} in {sessions[0].description}, batches of {inference.batch}")
        if state.token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
            log("Anyone who can reach this address can send requests: set --token-file, or use an authenticating proxy")
        host = f"[{options.host}]" if ":" in options.host else options.host
        log(f"Listening on http://{host}:{listener.getsockname()[1]}")
        run_server(create_app(state, draw_workers=workers), state, listener)


def parse_models(models: Sequence[str]) -> dict[str, Path]:
    """Return the model files by name, of arguments FILE and NAME=FILE.

    Raises:
        UsageError: a name is invalid or given twice, or a model is a URL.
    """
    paths: dict[str, Path] = {}
    for text in models:
        name, equals, file = text.partition("=")
        if not equals or Path(text).exists():
            name, file = Path(text).stem, text
        if is_url(file):
            raise UsageError(f"{redact(text)}: models are not read from URLs; download it, and give its path")
        if not _NAME.fullmatch(name):
            raise UsageError(f"{text}: {name!r} is no valid name; use letters, digits, _ . -, as in NAME={file}")
        names = {name, f"{name}_explain"}
        if any(names & {other, f"{other}_explain"} for other in paths):
            raise UsageError(f"{text}: the name {name!r} is taken by a model or its explain model; give NAME={file}")
        paths[name] = Path(file)
    return paths
