"""A real server in this process: uvicorn on a free port, with models of any session."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.predict.types import InferenceOptions
from opal_deploy.server import process
from opal_deploy.server.app import create_app
from opal_deploy.server.models import ServerState, start_model
from opal_deploy.server.options import ServeOptions
from opal_deploy.server.process import Server, bind
from opal_deploy.server.telemetry import MetricsTimer

Serve = Callable[..., Any]


class Running:
    """A server that runs in a thread; `url` is its address, `host` the address without its scheme."""

    def __init__(self, state, port, thread):
        self.state, self.thread, self.host = state, thread, f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"


@pytest.fixture(scope="session")
def serving():
    """A context manager that serves sessions by name; `limits` are options of `ServeOptions`."""
    return _serving


@contextmanager
def _serving(
    sessions, *, path=Path("model.onnx"), capacity=64, max_wait=0.005, limits=None, token=None, log=None, **options
):
    inference = InferenceOptions(**{"batch": 4, "workers": 2, **options})
    with ExitStack() as stack:
        # no request is on its way when a test ends
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(process, "_LAST_CALL_SECONDS", 0)
        state = ServerState(ServeOptions(**(limits or {})), token=token, log=log)
        for name, session in sessions.items():
            model = start_model(
                name, path, [session], inference, max_wait=max_wait, capacity=capacity,
                timer=MetricsTimer(state.metrics, name), observer=state.observer(name),
            )  # fmt: skip
            stack.callback(model.close)
            state.add(model)
        listener = stack.enter_context(bind("127.0.0.1", 0))
        server = Server(create_app(state), state)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        stack.callback(thread.join)
        stack.callback(lambda: setattr(server, "should_exit", True))
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        yield Running(state, listener.getsockname()[1], thread)
