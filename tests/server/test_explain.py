"""A picture in; its record, overlay or sheet out."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from PIL import Image

import opal_deploy
from opal_deploy.errors import UsageError
from opal_deploy.records.lines import read_lines
from opal_deploy.server.inference import FORMATS
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import ServeOptions
from tests.bright import BrightSession, wait_until
from tests.conftest import LEFT

GOLDEN = Path(__file__).parents[1] / "golden/0.1.0"


@pytest.fixture(scope="module")
def server(serving, exact_session):
    # processes, as `serve` has them
    with serving({"trees": exact_session}, isolate=True, max_pixels=100_000) as running:
        yield running


@pytest.fixture(scope="module")
def picture(make_pictures, tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"), 1)[0]


def png(width, height):
    stream = io.BytesIO()
    Image.new("1", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def ask(running, content, **options):
    return httpx.post(f"{running.url}/explain", content=content, timeout=30, **options)


def test_a_picture_gives_the_record_of_explain(server, picture, exact_model):
    expected = opal_deploy.load(exact_model, device="cpu", threads=1).predict(picture)
    expected["model_sha256"] = None
    data = picture.read_bytes()
    body = ask(server, data)
    assert body.json() == {**expected, "image": None}
    assert body.headers["content-type"] == "application/json"
    form = httpx.post(f"{server.url}/explain", params={"model": "trees"}, files={"image": ("../a.png", data)})
    # it is called as the client says, and no file of that name is ever opened
    assert form.json() == {**expected, "image": "../a.png"}


@pytest.mark.parametrize("name", ["pip", "proto"])
def test_other_heads_answer_as_in_python(serving, picture, name):
    path = GOLDEN / f"{name}.onnx"
    model = opal_deploy.load(path, device="cpu", threads=1)
    with serving({name: model.sessions[0]}, path=path) as running:
        body = ask(running, picture.read_bytes()).json()
        assert ask(running, picture.read_bytes(), params={"format": "sheet"}).status_code == 200
    assert body == {**model.predict(picture), "image": None, "model_sha256": None}


def test_an_edited_model_answers_with_the_slots_that_are_left(serving, edited_model, picture):
    expected = opal_deploy.load(edited_model, device="cpu", threads=1)
    with serving({"edited": expected.sessions[0]}, path=edited_model) as running:
        evidence = ask(running, picture.read_bytes()).json()["evidence"]
    record = expected.predict(picture)
    assert evidence == record["evidence"]
    assert sorted(slot["slot"] for slot in evidence) == LEFT[record["prediction"]["label"]]


@pytest.mark.parametrize(
    ("drawing", "kind", "accept"),
    [
        ("sheet", "PNG", "image/png"),
        ("overlay", "JPEG", "image/jpeg"),
        ("overlay", "JPEG", "image/png;q=0.2, application/json;q=0, image/*;q=0.9"),
    ],
)
def test_a_picture_gives_its_drawing_by_format_or_accept(server, picture, drawing, kind, accept):
    by_name = ask(server, picture.read_bytes(), params={"format": drawing})
    by_type = ask(server, picture.read_bytes(), headers={"Accept": accept})
    assert by_name.headers["content-type"] == by_type.headers["content-type"] == FORMATS[drawing]
    assert by_name.content == by_type.content
    assert Image.open(io.BytesIO(by_name.content)).format == kind


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"no picture", 415, "not_an_image"),
        (b"", 422, "empty_file"),
        (png(400, 400), 413, "too_many_pixels"),
        (png(300, 300)[:60], 422, "truncated_image"),
    ],
    ids=["text", "empty", "too large", "cut off"],
)
@pytest.mark.parametrize("drawing", ["record", "sheet"])
def test_a_bad_picture_is_refused_with_the_code_of_its_error_record(server, data, status, code, drawing):
    response = ask(server, data, params={"format": drawing})
    document = response.json()
    assert (response.status_code, document["code"], document["record"]["error"]["code"]) == (status, code, code)
    assert document["error"] == document["record"]["error"]["message"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"params": {"model": "none"}, "content": b"x"}, "model 'none' not found; available: trees, trees_explain"),
        ({"params": {"box": "1,2,3,4"}, "content": b"x"}, "parameter 'box' found"),
        ({"params": {"format": "svg"}, "content": b"x"}, "format 'svg' found; expected record, overlay, sheet"),
        ({"data": {"a": "b"}, "headers": {"content-type": "multipart/form-data"}}, "the form cannot be read"),
        ({"files": {"a": (None, b"text")}}, "the form has no file"),
        ({"files": [("a", ("a", b"1")), ("b", ("b", b"2"))]}, "Too many files"),
    ],
    ids=["model", "parameter", "format", "form", "no file", "two files"],
)
def test_a_wrong_call_is_refused_with_its_reason(server, how, reason):
    response = httpx.post(f"{server.url}/explain", **how)
    assert response.status_code in (400, 404)
    assert reason in response.json()["error"]


def test_drawings_do_not_queue_without_end(serving, picture):
    session, data = BrightSession(), picture.read_bytes()
    with serving({"light": session}) as running, ThreadPoolExecutor(16) as threads:
        hold = session.hold = threading.Event()
        drawn = [threads.submit(ask, running, data, params={"format": "sheet"}) for _ in range(16)]
        wait_until(lambda: running.state.models[0].service.in_flight == 16)
        refused = ask(running, data, params={"format": "overlay"})
        hold.set()
        assert refused.status_code == 429
        assert ask(running, data).status_code == 200
        assert {future.result().status_code for future in drawn} == {200}


def test_a_model_without_evidence_draws_nothing(serving, picture):
    session = BrightSession()
    session.metadata = replace(session.metadata, evidence="none")
    with serving({"linear": session}) as running:
        assert ask(running, picture.read_bytes()).json()["status"] == "ok"
        for drawing in ("sheet", "overlay"):
            assert ask(running, picture.read_bytes(), params={"format": drawing}).status_code == 400


def test_served_records_are_written_to_a_file(serving, tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    for data in (png(30, 30), b"no image"):
        with serving({"light": BrightSession()}, limits={"records": path}) as running:
            answer = ask(running, data)
    with path.open("rb") as stream:
        ok, failed = (line.document for line in read_lines(stream))
    assert ok["status"] == "ok"
    assert failed == answer.json()["record"]
    with pytest.raises(UsageError, match="--records"):
        ServerState(ServeOptions(records=tmp_path))
    # a full disk costs records, not answers
    with serving({"light": BrightSession()}, limits={"records": "/dev/full"}) as running:
        assert ask(running, png(30, 30)).status_code == 200
    assert "records are lost" in capsys.readouterr().err
