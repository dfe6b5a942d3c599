"""The process of `opal-deploy serve`: how it starts, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from opal_deploy.cli.serve import parse_models
from opal_deploy.errors import ExitCode, StoppedEarly, UsageError
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import ServeOptions, read_token
from opal_deploy.server.process import bind, run_server
from tests.bright import BrightSession, wait_until
from tests.server.test_limits import send_pixels

# an ONNX model is served where torch cannot be imported
MAIN = "import sys; sys.modules['torch'] = None; from opal_deploy.cli import main; main()"


@contextmanager
def serving(*arguments, cwd=None):
    """The process, and the address that it prints."""
    command = [sys.executable, "-c", MAIN, "serve", *map(str, arguments), "--port", "0", "--log-format", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.fullmatch(r"Listening on (http://.*)", json.loads(line)["message"]):
                    yield process, found[1]
                    return
            raise AssertionError(f"ended with {process.wait()}")
        finally:
            process.kill()


def test_a_stopping_server_listens_while_it_is_not_ready_and_a_second_signal_ends_it_at_once(exact_model):
    with serving(exact_model, "--device", "cpu", "--drain", "60") as (process, url):
        name, port = url.removeprefix("http://").split(":")
        assert httpx.get(f"{url}/v2/models/{exact_model.stem}").status_code == 200
        with socket.create_connection((name, int(port))) as client:
            # in flight until its body is there
            client.sendall(b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nsome")
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            while "Stopping after the requests in flight" not in process.stderr.readline():
                pass
            assert httpx.get(f"{url}/v2/health/ready").status_code == 503
            process.terminate()
            assert process.wait(60) == ExitCode.INTERRUPTED


def test_a_lost_device_ends_the_process_as_stopped_early():
    state = ServerState(ServeOptions())
    state.problem, state.failed = "the device was lost", True
    with bind("127.0.0.1", 0) as placeholder, pytest.raises(StoppedEarly, match="lost"):
        run_server(state, placeholder)


def test_requests_in_flight_are_answered_before_the_end(request, monkeypatch):
    session = BrightSession()
    with request.getfixturevalue("serving")({"light": session}) as server, httpx.Client(base_url=server.url) as idle:
        monkeypatch.setattr("opal_deploy.server.process._LAST_CALL_SECONDS", 0.5)
        assert idle.get("/v2/health/ready").status_code == 200
        hold = session.hold = threading.Event()
        with ThreadPoolExecutor(3) as threads, server.connect() as upload:
            posts = [threads.submit(send_pixels, server) for _ in "abc"]
            upload.sendall(b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n\r\nno i")
            wait_until(lambda: server.state.models[0].service.in_flight == 3)
            server.state.stopping = True
            wait_until(lambda: server.state.problem)
            last = idle.get("/v2/health/ready")
            assert (last.status_code, last.headers["connection"]) == (503, "close")
            time.sleep(1)
            hold.set()
            upload.sendall(b"mage")
            assert upload.makefile("rb").read().startswith(b"HTTP/1.1 415")
            assert [post.result().status_code for post in posts] == [200] * 3
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_models_are_named_by_their_files_or_by_the_call(tmp_path):
    odd = tmp_path / "a=b.onnx"
    odd.touch()
    named = {"birds.fp16": Path("runs/birds.fp16.onnx"), "dogs": Path("x/best.onnx")}
    assert parse_models(["runs/birds.fp16.onnx", "dogs=x/best.onnx"]) == named
    for models, word in (
        (["a.onnx", "b/a.onnx"], "taken"),
        (["a.onnx", "a_explain=b.onnx"], "taken"),
        ([str(odd)], "valid"),
        (["/=b.onnx"], "valid"),
        (["a=https://me:secret@host/a.onnx"], "https://host/a.onnx: models"),
    ):
        with pytest.raises(UsageError, match=word):
            parse_models(models)


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("OPAL_DEPLOY_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("OPAL_DEPLOY_TOKEN", "one")
    assert read_token(None) == "one"
    file = tmp_path / "token"
    file.write_text("two\n")
    assert read_token(file) == "two"
    for content in (b"", b" \n", "ü".encode(), b"a\nb"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="--token-file"):
            read_token(file)
    with pytest.raises(UsageError, match="--token-file"):
        read_token(tmp_path / "none")
