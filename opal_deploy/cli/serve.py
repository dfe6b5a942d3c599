"""`opal-deploy serve`: models behind HTTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.errors import UsageError, require
from opal_deploy.remote import is_url, redact
from opal_deploy.server.options import ServeOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def serve(
    options: ServeOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Exported models: FILE or NAME=FILE. Default name: the file's, without its suffix; default model: the "
            "one in this folder, or of the newest run in runs/."
        ),
    ] = None,
) -> None:
    """Serve models over HTTP: the Open Inference Protocol, version 2, and a page that explains a dropped image.

    NAME takes pixels and returns the graph's outputs; NAME_explain takes image files and returns `infer`'s records.
    """
    for package in ("starlette", "granian", "prometheus_client"):
        require(package, "serve", "serve", pip_name=package.replace("_", "-"))
    from opal_deploy.server.process import serve_models

    serve_models(parse_models(models or []), options)


def parse_models(models: Sequence[str]) -> dict[str, Path]:
    """Return the model files by name, of arguments FILE and NAME=FILE; UsageError for an invalid name or a URL."""
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
