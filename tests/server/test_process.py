"""The process of `opal-deploy serve`: how it starts, and how it ends."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from opal_deploy.cli.serve import parse_models
from opal_deploy.errors import ExitCode, StoppedEarly, UsageError
from opal_deploy.server.app import create_app
from opal_deploy.server.health import check_health
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import read_token
from opal_deploy.server.process import Server, bind, run_server
from tests.bright import wait_until

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
            # in work until its body is there
            client.sendall(b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nsome")
            wait_until(lambda: "opal_requests_in_progress 2.0" in httpx.get(f"{url}/metrics").text)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            while "Stopping after the requests in flight" not in process.stderr.readline():
                pass
            assert httpx.get(f"{url}/v2/health/ready").status_code == 503
            process.terminate()
            assert process.wait(60) == ExitCode.INTERRUPTED


def test_without_a_model_the_newest_exported_run_is_served(exact_model, tmp_path):
    (tmp_path / "runs/mine").mkdir(parents=True)
    shutil.copy(exact_model, tmp_path / "runs/mine/best.onnx")
    with serving("--device", "cpu", cwd=tmp_path) as (_, url):
        assert httpx.get(f"{url}/v2/models/best/ready").status_code == 200


def test_a_lost_device_ends_the_process_as_stopped_early():
    state = ServerState()
    state.observer("light").device_lost(StoppedEarly("the device was lost"))
    with bind("127.0.0.1", 0) as listener, pytest.raises(StoppedEarly, match="the device was lost"):
        run_server(create_app(state), state, listener)


def test_a_client_that_reads_nothing_is_left(monkeypatch):
    monkeypatch.setattr("opal_deploy.server.connections.READ_SECONDS", 0.2)
    ended = threading.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        ended.set()

    with bind("127.0.0.1", 0) as listener:
        server = Server(app, ServerState())
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        wait_until(lambda: server.started)
        with socket.create_connection(listener.getsockname(), 30) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            # what it sends to a client that left goes nowhere
            assert ended.wait(30)
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def test_the_health_check_of_a_container_asks_its_server(request, monkeypatch):
    # a server whose device was lost stops by itself, on a busy machine before it is asked
    monkeypatch.setattr(Server, "on_tick", uvicorn.Server.on_tick)
    with request.getfixturevalue("serving")({}) as server:
        port = server.url.rpartition(":")[2]
        command = f"/opt/bin/python /opt/bin/opal-deploy --debug serve m.onnx --host=0.0.0.0 --port {port}".split()
        # a server that drains is healthy
        server.state.problem = "the server is stopping"
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 503
        assert check_health(command) is None
        server.state.failed = True
        assert "answers 503: " in str(check_health(command))
    assert "does not answer: " in str(check_health(command))
    # nothing to ask
    assert check_health(["opal-deploy", "infer", "serve"]) is check_health(["sleep", "9"]) is None


def test_models_are_named_by_their_files_or_by_the_call(tmp_path):
    odd = tmp_path / "a=b.onnx"
    odd.touch()
    assert parse_models(["runs/birds.fp16.onnx", "dogs=x/best.onnx"]) == {
        "birds.fp16": Path("runs/birds.fp16.onnx"),
        "dogs": Path("x/best.onnx"),
    }
    for models, reason in (
        (["a.onnx", "b/a.onnx"], "the name 'a' is taken"),
        (["a.onnx", "a_explain=b.onnx"], "the name 'a_explain' is taken by a model or its explain model"),
        ([str(odd)], "'a=b' is no valid name"),
        (["/=b.onnx"], "'/' is no valid name"),
        (["s3://bucket/a.onnx"], "s3://bucket/a.onnx: models are not read from URLs"),
        (["a=https://me:secret@host/a.onnx"], "host/a.onnx: models are not read from URLs"),
    ):
        with pytest.raises(UsageError, match=re.escape(reason)):
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
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none")
    monkeypatch.setattr("opal_deploy.artifact.files._PIPE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    for endless in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_token(endless)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["none.onnx"], "none.onnx: no such model"),
        ([], "no exported model in the working directory; give one with opal-deploy serve FILE"),
        (["a.onnx", "--log-format", "xml"], "'--log-format': 'xml' is not one of 'text', 'json', 'off'"),
        (["a.onnx", "--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000: cannot listen there"),
    ],
)
def test_a_wrong_call_is_one_line(opal, tmp_path, arguments, reason):
    result = opal("serve", *arguments, cwd=tmp_path)
    assert result.returncode == ExitCode.USAGE
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_the_extra_it_says_what_to_install(opal, exact_model):
    result = opal("serve", exact_model, blocked=("uvicorn",))
    assert result.returncode == ExitCode.USAGE
    assert result.stderr == (
        "opal-deploy: serve needs uvicorn, which is not installed: pip install 'opal-deploy[serve]'\n"
    )
