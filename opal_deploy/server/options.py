"""The options of `opal-deploy serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from opal_deploy.errors import UsageError
from opal_deploy.options import (
    Batch,
    Decode,
    Devices,
    MaxPixels,
    Option,
    RuntimeChoice,
    SigningKey,
    StrPath,
    Threads,
    Top,
    Workers,
)
from opal_deploy.records.decision import Decision

TOKEN_VARIABLE = "OPAL_DEPLOY_TOKEN"
# of a token and the line end after it
_MOST_BYTES = 10_000
LogFormat = Literal["text", "json", "off"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Decision):
    """How models are served over HTTP."""

    host: Annotated[str, Option("Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0: any free port.", min=0, max=65535)] = 8000
    batch: Batch = None
    max_wait: Annotated[float, Option("Milliseconds that an image waits for others in flight.", min=0)] = 5.0
    queue: Annotated[
        int | None, Option("Maximum in-flight images per model; further requests get 429.", min=1, default="8 batches")
    ] = None
    max_body: Annotated[int, Option("Maximum size of a request body in MiB.", min=1)] = 64
    max_connections: Annotated[int, Option("Maximum open connections; further ones wait.", min=1)] = 1000
    upload_timeout: Annotated[float, Option("Seconds in which a request body must arrive.", min=0.1)] = 30.0
    request_timeout: Annotated[float, Option("Seconds in which a request must be answered.", min=0.1)] = 30.0
    token_file: Annotated[
        StrPath | None, Option("File with the bearer token that clients must send; or set OPAL_DEPLOY_TOKEN.", cli=Path)
    ] = None
    allowed_host: Annotated[
        tuple[str, ...],
        Option("Accept this Host name when no token is set. Repeatable; `*` accepts any.", cli=list[str]),
    ] = ()
    sign: SigningKey = None
    log_format: Annotated[
        LogFormat, Option("Log on stderr: text, json (one line per request), off (no lines for requests).")
    ] = "text"
    drain: Annotated[float, Option("Seconds to keep accepting requests after SIGTERM, while not ready.", min=0)] = 0.0
    records: Annotated[
        StrPath | None, Option("Append every served record to this JSON Lines file, for `drift`.", cli=Path)
    ] = None
    top: Top = 5
    device: Devices = "auto"
    threads: Threads = None
    runtime: RuntimeChoice = "auto"
    workers: Workers = None
    decode: Decode = "default"
    decode_timeout: Annotated[float, Option("Seconds to decode one image.", min=0.1)] = 10.0
    max_pixels: MaxPixels = 100_000_000


def read_token(path: StrPath | None) -> str | None:
    """Return the token that clients must send, of a file or OPAL_DEPLOY_TOKEN, if any; UsageError for a bad one."""
    origin, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
    if path is not None:
        origin = f"--token-file {path}"
        try:
            with open(path, "rb") as stream:
                token = stream.read(_MOST_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{origin}: cannot be read ({error})") from None
    token = None if token is None else token.strip()
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise UsageError(f"{origin}: no valid token found; expected one line of printable ASCII")
    return token
