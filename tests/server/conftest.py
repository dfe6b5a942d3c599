"""A real server in this process, on a free port, with models of any session."""

import asyncio
import socket
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from opal_deploy.server import process
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import ServeOptions


class Running:
    """A server that runs in a thread; `url` is its address, `host` the address without its scheme."""

    def __init__(self, state, port, thread):
        self.state, self.thread, self.host = state, thread, f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"

    def connect(self):
        name, port = self.host.split(":")
        return socket.create_connection((name, int(port)), 30)


@pytest.fixture(scope="session")
def serving():
    """A context manager that serves sessions by name; `options` are those of `ServeOptions`."""
    return _serving


@contextmanager
def _serving(sessions, *, path=Path("model.onnx"), token=None, **options):
    with ExitStack() as stack:
        # no request is on its way when a test ends
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(process, "_LAST_CALL_SECONDS", 0)
        defaults = {"queue": 64, "batch": 4, "workers": 2, "log_format": "off"}
        state = ServerState(ServeOptions(**(defaults | options)), token=token)
        stack.callback(state.close)
        for name, session in sessions.items():
            state.load(name, path, [session], None)
        placeholder = process.bind("127.0.0.1", 0)
        port, listening = placeholder.getsockname()[1], threading.Event()
        serve = process.serve_app(state, placeholder, listening.set)
        thread = threading.Thread(target=lambda: asyncio.run(serve))
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, state, "stopping", True)
        assert listening.wait(30)
        yield Running(state, port, thread)
