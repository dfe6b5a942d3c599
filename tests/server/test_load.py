"""Hostile requests against a real server; locust against `serve` from end to end."""

import json
import os
import subprocess
import sys

import pytest

from opal_deploy.runtime.onnx_session import OnnxSession
from tests.load.hostile import REQUESTS
from tests.load.run import Sent, memory_slope, p99_last_over_first

# the server waits for seconds
SLOW = ("slow head", "reads late")


@pytest.fixture(scope="module")
def server(serving, exact_model):
    session = OnnxSession(exact_model, device="cpu", threads=1)
    with serving({"m": session}, limits={"max_body": 16, "upload_timeout": 4.0}) as running:
        yield running


@pytest.mark.parametrize(
    "request_", [pytest.param(one, marks=pytest.mark.slow if one.name in SLOW else (), id=one.name) for one in REQUESTS]
)
def test_a_request_that_means_harm_is_refused_with_a_reason(server, request_):
    host, port = server.host.split(":")
    assert request_.send(host, int(port), "m") == ""


def test_a_soak_shows_slower_answers_and_growing_memory():
    sent = [Sent(100 + n / 10, "explain", 10.0 + n, 200, "right", "") for n in range(100)]
    assert p99_last_over_first(sent, 2.0) == pytest.approx(108.8 / 29.8, rel=0.01)
    # a minute of warming up, then 6 MB per minute
    slope = memory_slope([(float(t), 500.0 if t < 60 else 500 + (t - 60) / 10) for t in range(301)])
    assert slope["slope_mb_per_minute"] == pytest.approx(6.0)


def load(scenario, model, images, out, *options):
    command = [sys.executable, "-m", "tests.load.run", scenario, "--model", str(model), "--images", str(images)]
    done = subprocess.run(
        [*command, "--seconds", "5", "--users", "2", "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_locust_finds_nothing_lost_when_the_server_is_told_to_stop(exact_model, make_pictures, tmp_path):
    make_pictures(tmp_path / "images", 4)
    summary = load("sigterm", exact_model, tmp_path / "images", tmp_path / "out.json")
    assert summary["before_signal"]["right"] > 0
    assert summary["before_signal"]["wrong"] == 0
    assert (summary["exit_code"], summary["lost"], summary["losses"]) == (0, 0, [])


@pytest.mark.slow
@pytest.mark.data
def test_locust_finds_photographs_unharmed_beside_hostile_users(exact_model, photographs, odd_images, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for photograph in photographs[::100]:
        (images / photograph.name).symlink_to(photograph)
    summary = load("hostile", exact_model, images, tmp_path / "out.json", "--hostile", str(odd_images))
    assert summary["server_survived"]
    for phase in ("photographs_alone", "photographs_beside", "hostile", "afterwards"):
        assert summary[phase]["right"] > 0
        assert summary[phase]["problems"] == {}
