"""A model as an ASGI application, for a program that serves more than this model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from opal_deploy.api.model import Model
from opal_deploy.server.app import create_app
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import ServeOptions

# of the process and its sessions, which are the caller's here
_NOT_OURS = {
    "host", "port", "max_connections", "token_file", "allowed_host", "sign", "log_format", "drain", "device", "threads",
    "runtime",
}  # fmt: skip


class ModelApp:
    """The addresses of `opal-deploy serve`, as an ASGI application: the page, `/explain` and the protocol.

    Mount it, such as `app.mount("/model", model_app)`, and close it when the program ends. The program around it
    decides who may use it: it asks for no token and accepts any host name.
    """

    def __init__(self, model: Model, *, name: str = "model", **options: Any) -> None:
        """Warm up the model, and start its threads and decoding processes.

        Args:
            model: served until `close`; it may be used elsewhere at the same time.
            name: of the model in addresses and metrics.
            options: those of `opal-deploy serve`, except options of the process: `batch`, `queue`, `min_margin`, ...

        Raises:
            TypeError: no such option.
            UsageError: the model does not support an option. StoppedEarly: the device was lost.
        """
        if not hasattr(model, "sessions"):
            raise TypeError(f"ModelApp takes a loaded model, found {type(model).__name__}; use opal_deploy.load(path)")
        known = {option.name for option in fields(ServeOptions)} - _NOT_OURS
        if unknown := options.keys() - known:
            raise TypeError(f"unexpected keyword {min(unknown)!r}; options are {', '.join(sorted(known))}")
        self._state = ServerState(ServeOptions(**options, allowed_host=("*",), log_format="off"))
        self._state.load(name, model.path or Path(name), model.sessions, model.sha256)
        self._app = create_app(self._state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Finish the images in flight, and end threads and processes."""
        self._state.close()

    def __enter__(self) -> ModelApp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
