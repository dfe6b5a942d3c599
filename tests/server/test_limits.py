"""Limits: a client that sends too much, too slowly, or nonsense is refused; the others are answered."""

import gzip
import io
import json
import re
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from PIL import Image
from starlette.exceptions import HTTPException

from opal_deploy.server import process
from opal_deploy.server.bodies import MAX_JSON_VALUES, BadRequest, inflate, parse_request
from tests.bright import BrightSession, wait_until

INFER = "/v2/models/light/infer"
PIXELS = bytes(32 * 32 * 3)
RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"


@pytest.fixture(scope="module")
def server(serving):
    with serving({"light": BrightSession()}, max_body=1) as running:
        yield running


def png(width=40, height=30):
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def document(**changes):
    tensor = {"name": "images", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": [0] * len(PIXELS)}
    return {"inputs": [{name: value for name, value in (tensor | changes).items() if value is not None}]}


def binary(header, *parts):
    text = json.dumps(header).encode()
    return {"content": b"".join([text, *parts]), "headers": {"Inference-Header-Content-Length": str(len(text))}}


def sized(size, **changes):
    return document(data=None, parameters={"binary_data_size": size}, **changes)


def send_pixels(running, count=1):
    data = PIXELS * count
    return httpx.post(running.url + INFER, **binary(sized(len(data), shape=[count, 32, 32, 3]), data), timeout=60)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"content": b"[1]"}, "Expected `object`, got `array`"),
        ({"json": {}}, "missing required field `inputs`"),
        ({"json": {"inputs": []}}, "input 'images' is missing; found none"),
        ({"json": document(name="image")}, "input 'image' found; expected images"),
        ({"json": document(datatype="FP32")}, "datatype FP32 found; expected UINT8"),
        ({"json": document(shape=[1, 3, 32, 32])}, r"shape [1, 3, 32, 32] found; expected UINT8 [N, 32, 32, 3]"),
        ({"json": document(shape=[0, 32, 32, 3], data=[])}, "shape [0, 32, 32, 3] found"),
        ({"json": document(shape=[1 << 40, 32, 32, 3])}, "send several requests"),
        ({"json": document(data=[0] * 9)}, "data does not fit UINT8 [1, 32, 32, 3]"),
        ({"json": document(data=[256] * 3072)}, "Expected `int` <= 255"),
        ({"json": document(data=[[[[0] * 3] * 32] * 31])}, "shape [1, 31, 32, 3]"),
        ({"json": document(data=None)}, "has neither data nor a binary_data_size"),
        ({"json": document(shape=[65, 32, 32, 3], data=[0] * 3072 * 200)}, "expected at most 1,048,576"),
        (binary(sized(3072), PIXELS[:-1]), "3071 bytes found; expected 3072"),
        (binary(sized(3072), PIXELS, b"more"), "4 unexpected bytes after the last tensor"),
        (binary(sized(100), PIXELS[:100]), "100 bytes found; expected 3072"),
        ({"content": b"{}", "headers": {"Inference-Header-Content-Length": "9"}}, "expected a number of at most 2"),
        ({"content": b"{}", "headers": {"Inference-Header-Content-Length": "x"}}, "expected a number of"),
        ({"json": document() | {"outputs": [{"name": "boxes"}]}}, "output 'boxes' found; expected logits"),
        ({"content": b"x", "headers": {"Content-Encoding": "br"}}, "Content-Encoding br found"),
        ({"content": b"xx", "headers": {"Content-Encoding": "gzip"}}, "the body is not valid gzip"),
        # nested lists and members of gzip have held a server for minutes
        ({"content": b'{"x": ' + b"[" * 900_000}, "recursion depth"),
        ({"json": document(data=[[[[0]]] + [[[]]] * 100_000])}, "data does not fit"),
        ({"content": b'{"inputs": [' + b"{}," * 300_000 + b"{}]}"}, "missing required field"),
        ({"content": gzip.compress(b"") * 30_000, "headers": {"Content-Encoding": "gzip"}}, "gzip members"),
    ],
)
def test_a_malformed_request_is_refused_at_once_with_one_line(server, call, reason):
    start = time.monotonic()
    response = httpx.post(server.url + INFER, **call)
    assert time.monotonic() - start < 5
    assert response.status_code in (400, 413, 415)
    assert reason in response.json()["error"]
    assert "\n" not in response.json()["error"]


def test_json_of_too_many_values_is_refused_before_it_is_parsed():
    with pytest.raises(BadRequest, match="binary"):
        parse_request(b"," * MAX_JSON_VALUES, MAX_JSON_VALUES, [], [], 1)


def explain_binary(elements):
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2, 1]}
    return binary({"inputs": [tensor | {"parameters": {"binary_data_size": len(elements)}}]}, elements)


def explain_box(row):
    image = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}
    return {"json": {"inputs": [image, {"name": "box", "datatype": "FP32", "shape": [1, 4], "data": [row]}]}}


@pytest.mark.parametrize(
    "call",
    [
        *map(explain_binary, [b"\0", struct.pack("<I", 5) + b"four", struct.pack("<I", 1 << 31), bytes(12)]),
        *map(explain_box, [["5", "5", "20", "20"], [True, 0, 20, 20], [[5], [5], [20], [20]]]),
    ],
)
def test_elements_that_do_not_fill_their_bytes_and_boxes_of_other_than_four_numbers_are_refused(server, call):
    response = httpx.post(f"{server.url}/v2/models/light_explain/infer", **call)
    assert response.status_code == 400
    assert response.json()["error"].startswith(("input 'image': ", "input 'box': "))


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(server, announced):
    data = bytes(3_000_000)
    content = data if announced else iter([data[:1_000_000]] * 3)
    response = httpx.post(f"{server.url}/explain", content=content)
    assert response.status_code == 413
    assert "expected at most 1,048,576" in response.json()["error"]
    # nothing of it is counted any more
    assert server.state.bodies.held_bytes == 0


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_compressed_body_is_read_whole_and_within_limits(compress):
    assert inflate(compress(PIXELS), len(PIXELS)) == PIXELS
    for body, limit, reason in (
        (compress(bytes(50_000_000)), 1 << 20, "large"),
        (compress(b"ab"), 1, "large"),
        (compress(PIXELS)[:-5], 1 << 20, "truncated"),
        (b"", 1, "truncated"),
        (compress(b"ab") + compress(b"c"), 3, "members"),
        (compress(PIXELS) + b"more", 1 << 20, "members"),
    ):
        with pytest.raises(HTTPException, match=reason):
            inflate(body, limit)


def test_a_head_is_limited_in_size(server):
    assert httpx.get(f"{server.url}/v2", headers={"X-Filler": "x" * 30_000}).status_code == 200
    assert httpx.get(f"{server.url}/v2", headers={"X-Filler": "x" * 200_000}).status_code == 431
    assert httpx.get(f"{server.url}/metrics/").status_code == 404
    assert httpx.get(server.url + INFER).status_code == 405


HEAD = b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"


@pytest.mark.parametrize(
    ("start", "status"), [(HEAD, b""), (HEAD + b"\r\n", b"HTTP/1.1 408")], ids=["half a head", "half a body"]
)
def test_a_slow_client_is_given_up_and_its_place_goes_to_another(serving, monkeypatch, start, status):
    monkeypatch.setattr(process, "_HEAD_SECONDS", 0.5)
    with serving({"light": BrightSession()}, upload_timeout=0.5, max_connections=2) as running:
        slow = [running.connect() for _ in range(2)]
        for client in slow:
            client.sendall(start)
        assert httpx.get(f"{running.url}/v2/health/live", timeout=20).status_code == 200
        for client in slow:
            with client:
                assert client.makefile("rb").read().startswith(status)


@pytest.fixture
def held(serving):
    """A server whose session answers one image at a time, and only once `hold` is set; a pool of clients."""
    session = BrightSession()
    with ExitStack() as stack:

        def start(**limits):
            running = stack.enter_context(serving({"light": session}, batch=1, max_wait=0, **limits))
            session.batches.clear()
            hold = session.hold = threading.Event()
            pool = stack.enter_context(ThreadPoolExecutor(8))
            stack.callback(hold.set)

            def send(count):
                return [pool.submit(explain, running) for _ in range(count)]

            return SimpleNamespace(running=running, session=session, hold=hold, send=send)

        yield start


def explain(running, data=None):
    return httpx.post(f"{running.url}/explain", content=png() if data is None else data, timeout=60)


def in_flight(running):
    return running.state.models[0].service.in_flight


def test_more_than_the_queue_holds_is_refused_and_what_was_taken_is_answered(held):
    server = held(queue=6)
    taken = server.send(6)
    wait_until(lambda: in_flight(server.running) == 6)
    for refused in (explain(server.running), send_pixels(server.running)):
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "6 images are in flight" in refused.json()["error"]
    server.hold.set()
    assert {future.result().status_code for future in taken} == {200}
    # more than it will ever hold is no reason to come again
    many = send_pixels(server.running, 7)
    assert many.status_code == 400
    assert "send several requests" in many.json()["error"]


def test_an_answer_that_takes_too_long_costs_no_work(held):
    server = held(request_timeout=0.5)
    assert {post.result().status_code for post in server.send(3)} == {504}
    server.hold.set()
    wait_until(lambda: in_flight(server.running) == 0)
    # at most the one whose batch had begun
    assert sum(server.session.batches) <= 1


def test_a_lost_device_makes_the_server_unwell_and_end(serving):
    session = BrightSession()
    with serving({"light": session}) as running:
        session.fails_at = len(session.batches)
        lost = send_pixels(running)
        assert (lost.status_code, lost.headers["connection"]) == (503, "close")
        assert "the device was lost" in lost.json()["error"]
        running.thread.join(30)
        assert not running.thread.is_alive()


def test_requests_are_logged_and_counted(serving, capsys):
    with serving({"light": BrightSession()}, log_format="json", min_margin=2.0) as running:
        trace = {"traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01"}
        for data in (png(), b"junk"):
            httpx.post(f"{running.url}/explain", content=data, headers={"X-Request-ID": "mine", **trace})
        httpx.get(f"{running.url}/v2/models/%0anone")
        text = httpx.get(f"{running.url}/metrics").text
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line.get("trace") for line in lines] == ["a1" * 16, "a1" * 16, None]
    shown = [(line["path"], line["status"], line.get("model"), line["id"] == "mine") for line in lines]
    assert shown == [
        ("/explain", 200, "light", True), ("/explain", 415, "light", True), ("/v2/models/\nnone", 404, None, False)
    ]  # fmt: skip
    for expected in (
        'opal_requests_total{model="light",route="explain",status="200"} 1.0',
        'opal_requests_total{model="",route="model_metadata",status="404"} 1.0',
        'opal_image_errors_total{code="not_an_image",model="light"} 1.0',
        'opal_predictions_total{label="dim",model="light",status="abstained"} 1.0',
        'opal_margin_count{model="light"} 1.0',
        'opal_images_in_flight{model="light"} 0.0',
        'opal_batch_images_count{model="light"}',
    ):
        assert expected in text
    # every alert names metrics that there are
    (rule,) = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
    assert all(name in text for name in re.findall(r"opal_\w+", rule["expr"]))
