"""A real tritonserver, of the wheel nvidia-pytriton, which `make triton-venv` installs in a virtual environment."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-triton"
PACKAGES = next((VENV / "lib").glob("python3*/site-packages"), VENV)
PROGRAM = PACKAGES / "pytriton/tritonserver"
needs_tritonserver = pytest.mark.skipif(
    not PROGRAM.is_dir(),
    reason="no tritonserver: `make triton-venv` installs it (Linux on x86_64, Python 3.11 or 3.12)",
)
_START_SECONDS = 100


class Server:
    """A running server; models are loaded by name."""

    def __init__(self, ports, log):
        self._ports, self._log = ports, log

    def client(self, protocol):
        """Return a client of `tritonclient.http` or `tritonclient.grpc`."""
        name = protocol.__name__.rpartition(".")[2]
        options = {"network_timeout": 60.0, "connection_timeout": 60.0} if name == "http" else {}
        return protocol.InferenceServerClient(f"127.0.0.1:{self._ports[name]}", **options)

    @property
    def log(self):
        return self._log.read_text("utf-8", "replace")


@contextlib.contextmanager
def run_server(repository, models, folder):
    """Start a server with the models of a repository that are named, and stop it when the block ends.

    Args:
        repository: the model repository.
        models: those to load; a server whose models do not load ends at once.
        folder: for its backends and its log.
    """
    backends = folder / "backends"
    # beside its library the Python backend looks for the process that runs Python code, here of the right version
    shutil.copytree(PROGRAM / "backends", backends)
    version = PACKAGES.parent.name.removeprefix("python")
    shutil.copy(PROGRAM / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    shutil.copytree(Path(__file__).parent / "backends", backends, dirs_exist_ok=True)
    python = str(VENV / "bin/python")
    libdir = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"], text=True
    ).strip()
    libraries = [libdir, str(PACKAGES / "nvidia_pytriton.libs")]
    log = folder / "tritonserver.log"
    with reserved_ports("http", "grpc") as ports, log.open("wb") as output:
        process = subprocess.Popen(
            [PROGRAM / "bin/tritonserver", f"--model-repository={repository}", f"--backend-directory={backends}",
             "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false", "--exit-timeout-secs=5",
             "--disable-auto-complete-config", "--model-control-mode=explicit",
             *(f"--load-model={model}" for model in models),
             *(f"--{name}-port={port}" for name, port in ports.items()), *(f"--reuse-{name}-port=1" for name in ports)],
            stdout=output,
            stderr=subprocess.STDOUT,
            # the Python code of models finds opal_deploy in the working directory
            cwd=ROOT,
            env={**os.environ, "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                 "LD_LIBRARY_PATH": ":".join(libraries)},
            start_new_session=True,
        )  # fmt: skip
        try:
            server = Server(ports, log)
            _wait_until_ready(server, process)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def reserved_ports(*names):
    """Yield a port for each name, which nobody else is given while the block runs."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in names:
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("127.0.0.1", 0))
            ports[name] = holder.getsockname()[1]
        yield ports


def _wait_until_ready(server, process):
    import tritonclient.grpc as protocol

    deadline = time.monotonic() + _START_SECONDS
    with server.client(protocol) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(protocol.InferenceServerException):
                if client.is_server_ready():
                    return
            time.sleep(0.1)
    raise RuntimeError(f"tritonserver did not start:\n{server.log[-4000:]}")
