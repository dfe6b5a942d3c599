"""Limits: a client that sends too much, too slowly, or nonsense is refused."""

import gzip
import io
import json
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from PIL import Image

from opal_deploy.records.decision import Decision
from opal_deploy.server.admission import HttpError, inflate
from opal_deploy.server.telemetry import ServerLog
from tests.bright import BrightSession, wait_until

INFER = "/v2/models/light/infer"
RAW = {"Inference-Header-Content-Length": "0"}
PIXELS = bytes(32 * 32 * 3)


@pytest.fixture(scope="module")
def server(serving):
    with serving({"light": BrightSession()}, limits={"max_body": 1}) as running:
        yield running


def picture(shade=90):
    stream = io.BytesIO()
    Image.new("RGB", (40, 30), (shade, shade, shade)).save(stream, "PNG")
    return stream.getvalue()


def document(**changes):
    tensor = {"name": "images", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": [0] * len(PIXELS)}
    return {"inputs": [{name: value for name, value in (tensor | changes).items() if value is not None}]}


def binary(header, *parts):
    text = json.dumps(header).encode()
    return {"content": b"".join([text, *parts]), "headers": {"Inference-Header-Content-Length": str(len(text))}}


def sized(size, **changes):
    return document(data=None, parameters={"binary_data_size": size}, **changes)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"content": b""}, "the body is not valid JSON"),
        ({"content": b"[" * 5000}, "the body is not valid JSON"),
        ({"content": b"[1]"}, "the body is not a JSON object"),
        ({"json": {}}, "inputs is not a list of objects"),
        ({"json": {"inputs": []}}, "input 'images' is missing; found none"),
        ({"json": document(name="image")}, "input 'image' found; expected images"),
        ({"json": document(datatype="FP32")}, "datatype FP32 found; expected UINT8"),
        ({"json": document(shape=[1, 3, 32, 32])}, r"shape [1, 3, 32, 32] found; expected UINT8 [N, 32, 32, 3]"),
        ({"json": document(shape=[0, 32, 32, 3], data=[])}, "shape [0, 32, 32, 3] found"),
        ({"json": document(shape=[1 << 40, 32, 32, 3])}, "send several requests"),
        ({"json": {"inputs": [{}] * 10_000}}, "10,001 objects of JSON found"),
        ({"json": document(data=[0] * 9)}, "9 values found; expected 3072"),
        ({"json": document(data=[256] * 3072)}, "values other than integers from 0 to 255"),
        ({"json": document(data=[[1], [1, 2]])}, "2 values found; expected 1, in lists like [1, 32, 32, 3]"),
        ({"json": document(data=[[0] * 3072])}, "3072 values found; expected 32, in lists like [1, 32, 32, 3]"),
        ({"json": document(data=[True] * 3072)}, "values other than integers from 0 to 255"),
        ({"json": document(data=[1.0] * 3072)}, "values other than integers from 0 to 255"),
        ({"json": document(data=None)}, "has neither data nor a binary_data_size"),
        ({"json": {"inputs": document()["inputs"] * 2}}, "input 'images' is given twice"),
        ({"json": document(shape=[65, 32, 32, 3], data=[0] * 3072 * 200)}, "expected at most 1,048,576"),
        (binary(sized(3072), PIXELS[:-1]), "3071 binary bytes found; expected 3072"),
        (binary(sized(3072), PIXELS, b"more"), "4 unexpected bytes after the last tensor"),
        (binary(sized(-1), PIXELS), "binary_data_size -1 found"),
        (binary(sized(100), PIXELS[:100]), "100 bytes found; expected 3072"),
        ({"content": b"{}", "headers": {"Inference-Header-Content-Length": "9"}}, "is 9, and the body has 2 bytes"),
        ({"content": b"{}", "headers": {"Inference-Header-Content-Length": "x"}}, "expected a number of bytes"),
        ({"content": PIXELS[:-1], "headers": RAW}, "expected a multiple of 3072"),
        ({"json": document(parameters={"shared_memory_region": "a"}, data=None)}, "shared memory is not supported"),
        ({"json": document() | {"outputs": [{"name": "boxes"}]}}, "output 'boxes' found; expected logits"),
        ({"json": document() | {"id": 7}}, "id is not a string"),
        ({"content": b"x", "headers": {"Content-Encoding": "br"}}, "Content-Encoding br found"),
        ({"content": b"xx", "headers": {"Content-Encoding": "gzip"}}, "the body is not valid gzip"),
    ],
)
def test_a_malformed_request_is_refused_with_one_line(server, call, reason):
    response = httpx.post(server.url + INFER, **call)
    assert response.status_code in (400, 413, 415)
    error = response.json()["error"]
    assert reason in error
    assert "\n" not in error


@pytest.mark.parametrize(
    "elements",
    [b"", b"\0", struct.pack("<I", 5) + b"four", struct.pack("<I", 1 << 31), struct.pack("<I", 0) * 3],
    ids=["none", "half a length", "cut off", "far too long", "too many"],
)
def test_elements_that_do_not_fill_their_bytes_are_refused(server, elements):
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2, 1]}
    header = {"inputs": [tensor | {"parameters": {"binary_data_size": len(elements)}}]}
    response = httpx.post(f"{server.url}/v2/models/light_explain/infer", **binary(header, elements))
    assert response.status_code == 400
    assert response.json()["error"].startswith("input 'image': ")


def test_hostile_images_do_not_affect_the_others(serving):
    bomb = io.BytesIO()
    Image.new("1", (6000, 6000)).save(bomb, "PNG")
    pictures = [picture(40), b"junk", picture(200), bomb.getvalue(), picture(40)[:50], b"", picture(90)]
    elements = b"".join(struct.pack("<I", len(one)) + one for one in pictures)
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(pictures), 1]}
    header = {"inputs": [tensor | {"parameters": {"binary_data_size": len(elements)}}]}
    with serving({"light": BrightSession()}, isolate=True, max_pixels=1_000_000) as running:
        response = httpx.post(f"{running.url}/v2/models/light_explain/infer", **binary(header, elements))
    records = [json.loads(text) for text in response.json()["outputs"][0]["data"]]
    assert [record.get("error", {}).get("code") for record in records] == [
        None, "not_an_image", None, "too_many_pixels", "truncated_image", "empty_file", None,
    ]  # fmt: skip


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(server, announced):
    data = bytes(3_000_000)
    content = data if announced else iter([data[:1_000_000]] * 3)
    response = httpx.post(f"{server.url}/explain", content=content)
    assert response.status_code == 413
    assert "expected at most 1,048,576" in response.json()["error"]
    # nothing of it is counted any more
    assert server.state.admission.requests == server.state.admission.held_bytes == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_inflates_too_far_is_refused(server, encoding):
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    response = httpx.post(
        server.url + INFER, content=compress(bytes(50_000_000)), headers={"Content-Encoding": encoding}
    )
    assert response.status_code == 413
    assert "after decompression" in response.json()["error"]
    for damaged in (compress(PIXELS)[:-5], compress(PIXELS) + b"more"):
        with pytest.raises(HttpError, match=r"truncated or has trailing|not valid gzip"):
            inflate(damaged, encoding, 100_000)


def test_all_members_of_a_gzip_body_are_read():
    assert inflate(gzip.compress(b"ab") + gzip.compress(b"c"), "gzip", 100) == b"abc"
    with pytest.raises(HttpError, match="after decompression"):
        inflate(gzip.compress(b"ab") + gzip.compress(b"c"), "gzip", 2)


@pytest.mark.parametrize("row", [["5", "5", "20", "20"], [True, 0, 20, 20], [[5], [5], [20], [20]]])
def test_a_box_of_anything_but_four_numbers_is_refused(server, row):
    image = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}
    box = {"name": "box", "datatype": "FP32", "shape": [1, 4], "data": [row]}
    response = httpx.post(f"{server.url}/v2/models/light_explain/infer", json={"inputs": [image, box]})
    assert response.status_code == 400
    assert response.json()["error"].startswith("input 'box': ")


def raw_answer(running, request):
    with socket.create_connection(("127.0.0.1", int(running.host.split(":")[1])), 30) as client:
        client.sendall(request)
        return client.makefile("rb").read()


def test_a_request_whose_length_is_ambiguous_ends_its_connection(server):
    head = b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw_answer(server, head + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 4")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_head_that_is_too_large_is_refused_also_when_it_arrives_at_once(server):
    answer = httpx.get(f"{server.url}/metrics", headers={"X-Filler": "x" * 60_000})
    assert answer.status_code in (400, 431)
    assert httpx.get(f"{server.url}/metrics/").status_code == 404
    assert httpx.get(server.url + INFER).status_code == 405


def test_few_bodies_are_inflated_at_a_time(serving, monkeypatch):
    counts, most, lock = [0], [0], threading.Lock()

    def slow(data, encoding, limit):
        with lock:
            counts[0] += 1
            most[0] = max(most[0], counts[0])
        time.sleep(0.05)
        with lock:
            counts[0] -= 1
        return inflate(data, encoding, limit)

    monkeypatch.setattr("opal_deploy.server.admission.inflate", slow)
    body = {"content": gzip.compress(b"no image"), "headers": {"Content-Encoding": "gzip"}}
    with serving({"light": BrightSession()}) as server, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{server.url}/explain", **body), range(6)))
    assert [answer.status_code for answer in answers] == [415] * 6
    assert most[0] <= 2


def test_more_than_the_queue_holds_is_refused_and_what_was_taken_is_answered(serving):
    hold = threading.Event()
    session = BrightSession()
    with serving({"light": session}, batch=2, capacity=6) as running, ThreadPoolExecutor(20) as threads:
        session.hold = hold
        url = f"{running.url}/explain"
        taken = [threads.submit(httpx.post, url, content=picture(), timeout=30) for _ in range(6)]
        wait_until(lambda: running.state.models[0].service.in_flight == 6)
        for refused in (
            httpx.post(url, content=picture()),
            httpx.post(running.url + INFER, content=PIXELS, headers=RAW),
        ):
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "6 images are in flight" in refused.json()["error"]
        hold.set()
        assert {future.result().status_code for future in taken} == {200}
        # more than it will ever hold is no reason to come again
        many = httpx.post(running.url + INFER, content=PIXELS * 7, headers=RAW)
        assert many.status_code == 400
        assert "7 images found; expected at most 6; send several requests" in many.json()["error"]


def test_too_many_requests_are_refused_before_their_bodies_are_read(serving):
    session = BrightSession()
    with serving({"light": session}, limits={"max_requests": 1}) as running, ThreadPoolExecutor(1) as threads:
        hold = session.hold = threading.Event()
        first = threads.submit(httpx.post, f"{running.url}/explain", content=picture(), timeout=30)
        wait_until(lambda: running.state.admission.requests == 1)
        refused = httpx.post(f"{running.url}/explain", content=picture())
        # who asks whether it is well is answered
        assert httpx.get(f"{running.url}/v2/health/ready").status_code == 200
        hold.set()
        assert (refused.status_code, first.result().status_code) == (429, 200)


def test_an_answer_that_takes_too_long_costs_no_work(serving):
    session = BrightSession()
    with serving({"light": session}, batch=1, max_wait=0, limits={"request_timeout": 0.5}) as running:
        session.batches.clear()
        hold = session.hold = threading.Event()
        with ThreadPoolExecutor(3) as threads:
            posts = [threads.submit(httpx.post, f"{running.url}/explain", content=picture(), timeout=60) for _ in "abc"]
            late = [post.result() for post in posts]
        assert {answer.status_code for answer in late} == {504}
        assert "not answered within 0.5 s" in late[0].json()["error"]
        hold.set()
        wait_until(lambda: running.state.models[0].service.in_flight == 0)
        # at most the one whose batch had begun
        assert sum(session.batches) <= 1


def test_a_client_that_leaves_costs_no_work(serving):
    session = BrightSession()
    with serving({"light": session}, batch=1, max_wait=0) as running, ThreadPoolExecutor(1) as threads:
        session.batches.clear()
        hold, begun = threading.Event(), threading.Event()
        session.hold = SimpleNamespace(wait=lambda seconds: (begun.set(), hold.wait(seconds)))
        first = threads.submit(httpx.post, f"{running.url}/explain", content=picture(), timeout=60)
        assert begun.wait(30)
        data = picture()
        with socket.create_connection(("127.0.0.1", int(running.host.split(":")[1])), 10) as client:
            head = b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
            client.sendall(head + data)
            wait_until(lambda: running.state.models[0].service.in_flight == 2)
        wait_until(lambda: running.state.admission.requests == 1)
        hold.set()
        assert first.result().status_code == 200
        wait_until(lambda: running.state.models[0].service.in_flight == 0)
        assert session.batches == [1]


def test_a_token_opens_everything_and_health_is_open(serving):
    with serving({"light": BrightSession()}, token="s3cret") as running, httpx.Client(base_url=running.url) as client:
        assert client.get("/v2/health/live").status_code == client.get("/v2/health/ready").status_code == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
            for path in ("/v2/models/light", "/metrics", "/none"):
                refused = client.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer s3cret"}
        assert client.get("/v2/models/light", headers=headers).status_code == 200
        assert client.post("/explain", content=picture(), headers=headers).json()["status"] == "ok"


def test_a_lost_device_makes_the_server_unwell_and_end(serving):
    session = BrightSession()
    with serving({"light": session}) as running, httpx.Client(base_url=running.url) as client:
        session.fails_at = len(session.batches)
        lost = client.post(INFER, content=PIXELS, headers=RAW)
        assert lost.status_code == 503
        assert "the device was lost" in lost.json()["error"]
        assert lost.headers["connection"] == "close"
        assert running.state.failed
        running.thread.join(30)
        assert not running.thread.is_alive()


def test_requests_are_logged_and_counted(serving, capsys):
    with serving({"light": BrightSession()}, log=ServerLog("json"), decision=Decision(min_margin=2.0)) as running:
        for data in (picture(), picture(), b"junk"):
            httpx.post(f"{running.url}/explain", content=data, headers={"X-Request-ID": "mine"})
        httpx.get(f"{running.url}/v2/models/%0anone")
        response = httpx.get(f"{running.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    shown = [(line["path"], line["status"], line.get("model"), line["id"] == "mine") for line in lines]
    assert shown == [
        ("/explain", 200, "light", True), ("/explain", 200, "light", True), ("/explain", 415, "light", True),
        ("/v2/models/\nnone", 404, None, False),
    ]  # fmt: skip
    for expected in (
        'opal_requests_total{model="light",route="explain",status="200"} 2.0',
        'opal_requests_total{model="",route="model_metadata",status="404"} 1.0',
        'opal_image_errors_total{code="not_an_image",model="light"} 1.0',
        'opal_predictions_total{label="dim",model="light",status="abstained"} 2.0',
        'opal_margin_count{model="light"} 2.0',
        'opal_images_in_flight{model="light"} 0.0',
    ):
        assert expected in response.text


def test_pixels_and_pictures_share_batches(serving):
    session = BrightSession()
    with serving({"light": session}, batch=2, max_wait=60) as running, ThreadPoolExecutor(2) as threads:
        session.batches.clear()
        tensors = threads.submit(httpx.post, running.url + INFER, content=PIXELS, headers=RAW, timeout=30)
        record = threads.submit(httpx.post, f"{running.url}/explain", content=picture(), timeout=30)
        assert tensors.result().status_code == 200
        assert record.result().json()["status"] == "ok"
    assert session.batches == [2]


def test_a_slow_head_is_given_up(server, monkeypatch):
    monkeypatch.setattr("opal_deploy.server.connections._HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", int(server.host.split(":")[1])), 30) as client:
        client.sendall(b"POST /explain HTTP/1.1\r\nHost")
        assert client.recv(100) == b""
