"""An image in, its record out; alone, within another application, and with a signature."""

import asyncio
import base64
import json
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from starlette.applications import Starlette
from starlette.routing import Mount

import opal_deploy
from opal_deploy.errors import UsageError
from opal_deploy.records.lines import read_lines
from opal_deploy.records.signatures import PublicKeys
from opal_deploy.server.models import ServerState
from opal_deploy.server.options import ServeOptions
from tests.bright import BrightSession
from tests.records.test_signatures import write
from tests.server.test_limits import png

GOLDEN = Path(__file__).parents[1] / "golden/0.1.0"


@pytest.fixture(scope="module")
def picture(make_pictures, tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"), 1)[0]


def ask(running, content, **options):
    return httpx.post(f"{running.url}/explain", content=content, timeout=30, **options)


@pytest.mark.parametrize("name", ["exact", "edited", "pip", "proto"])
def test_an_image_gives_the_record_of_explain(serving, exact_model, edited_model, picture, name):
    path = {"exact": exact_model, "edited": edited_model}.get(name, GOLDEN / f"{name}.onnx")
    model = opal_deploy.load(path, device="cpu", threads=1)
    with serving({name: model.sessions[0]}, path=path) as running:
        # no file of that name is ever opened
        answer = ask(running, picture.read_bytes(), params={"name": "../a.png", "model": name})
        unnamed = ask(running, picture.read_bytes()).json()
    expected = {**model.predict(picture), "image": "../a.png", "model_sha256": None}
    assert answer.json() == expected
    assert answer.headers["content-type"] == "application/json"
    assert unnamed == {**expected, "image": None}


def test_a_bad_image_is_refused_with_the_code_of_its_error_record_and_a_wrong_call_with_its_reason(serving):
    with serving({"light": BrightSession()}, max_pixels=100_000) as running:
        for data, status, code in (
            (b"no picture", 415, "not_an_image"),
            (b"", 422, "empty_file"),
            (png(400, 400), 413, "too_many_pixels"),
            (png(300, 300)[:60], 422, "truncated_image"),
        ):
            response = ask(running, data)
            document = response.json()
            assert (response.status_code, document["code"], document["record"]["error"]["code"]) == (status, code, code)
            assert document["error"] == document["record"]["error"]["message"]
        assert "available: light, light_explain" in ask(running, b"x", params={"model": "none"}).json()["error"]
        assert "parameter 'box'" in ask(running, b"x", params={"box": "1,2,3,4"}).json()["error"]


def test_served_records_are_written_to_a_file(serving, tmp_path):
    path = tmp_path / "records.jsonl"
    for data in (png(30, 30), b"no image"):
        with serving({"light": BrightSession()}, records=path) as running:
            answer = ask(running, data)
    with path.open("rb") as stream:
        ok, failed = (line.document for line in read_lines(stream))
    assert ok["status"] == "ok"
    assert failed == answer.json()["record"]
    with pytest.raises(UsageError, match="--records"):
        ServerState(ServeOptions(records=tmp_path))
    # a full disk costs records, not answers
    with serving({"light": BrightSession()}, records="/dev/full") as running:
        assert ask(running, png(30, 30)).status_code == 200


def test_every_answer_is_signed(serving, exact_session, picture, tmp_path):
    key = ed25519.Ed25519PrivateKey.generate()
    write(tmp_path / "key.pem", key)
    write(tmp_path / "public.pem", key, public=True)
    data = picture.read_bytes()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "parameters": {"content_type": "base64"}}
    document = {"inputs": [{**tensor, "data": [base64.b64encode(data).decode()]}]}
    with serving({"exact": exact_session}, sign=tmp_path / "key.pem") as running:
        infer = httpx.post(f"{running.url}/v2/models/exact_explain/infer", json=document).json()
        parameters = httpx.get(f"{running.url}/v2/models/exact").json()["parameters"]
        records = [
            ask(running, data).json(),
            ask(running, b"no image").json()["record"],
            json.loads(infer["outputs"][0]["data"][0]),
        ]
    assert {record["signature"]["key"] for record in records} == {parameters["signing_key"]}
    public = PublicKeys([tmp_path / "public.pem"])
    assert [public.find_fault(record) for record in records] == [""] * 3


def test_a_model_answers_below_the_path_at_which_it_is_mounted(exact_model):
    model, data = opal_deploy.load(exact_model, device="cpu", threads=1), png(90, 70)
    with pytest.raises(TypeError, match="explain"):
        opal_deploy.ModelApp(model, explain=True)
    with opal_deploy.ModelApp(model, name="trees", batch=2, workers=1, min_margin=2.0) as app:
        outer = Starlette(routes=[Mount("/model", app)])

        async def send():
            transport = httpx.ASGITransport(outer)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
                explained = await client.post("/model/explain", content=data)
                return explained, *[await client.get(f"/model{path}") for path in ("/", "/v2/health/ready", "/nope")]

        explained, page, ready, missing = asyncio.run(send())
    record = explained.json()
    assert record["status"] == "abstained"
    assert record["prediction"]["label"] == model.predict(data).label
    assert 'src="page.js"' in page.text
    assert ready.json() == {"ready": True}
    assert "/explain" in missing.json()["error"]
