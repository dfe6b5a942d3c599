"""`serve --sign`: every record that leaves the server is signed, and can be checked from a file."""

import base64
import json

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from opal_deploy.records.signatures import PublicKeys
from tests.cli.calls import check
from tests.records.test_signatures import write
from tests.server.test_process import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_pictures):
    folder = tmp_path_factory.mktemp("served")
    key = ed25519.Ed25519PrivateKey.generate()
    write(folder / "key.pem", key)
    write(folder / "public.pem", key, public=True)
    make_pictures(folder / "in", 2)
    return folder


@pytest.fixture(scope="module")
def answers(folder, exact_model):
    """The answers of `/explain` and of the explain model, and the key that the server names."""
    data = (folder / "in/000.png").read_bytes()
    encoded = base64.b64encode(data).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "parameters": {"content_type": "base64"}}
    with serving(exact_model, "--device", "cpu", "--sign", folder / "key.pem") as (_, url):
        infer = f"{url}/v2/models/exact_explain/infer"
        return {
            "record": httpx.post(f"{url}/explain", content=data).content,
            "form": httpx.post(f"{url}/explain", files={"image": ("a.png", data)}).content,
            "error": httpx.post(f"{url}/explain", content=b"no image").content,
            "tensor": httpx.post(infer, json={"inputs": [{**tensor, "data": [encoded]}]}).json()["outputs"][0]["data"][
                0
            ],
            "binary": httpx.post(infer, headers={"Inference-Header-Content-Length": "0"}, content=data).content,
            "key": httpx.get(f"{url}/v2/models/exact/config").json()["parameters"]["signing_key"]["string_value"],
            "metrics": httpx.get(f"{url}/metrics").text,
        }


def test_every_answer_is_signed_with_the_key_that_the_server_names(folder, answers):
    public = PublicKeys([folder / "public.pem"])
    start = answers["binary"].index(b'{"schema"')
    records = [
        json.loads(answers["record"]), json.loads(answers["form"]), json.loads(answers["error"])["record"],
        json.loads(answers["tensor"]), json.loads(answers["binary"][start:]),
    ]  # fmt: skip
    assert [public.find_fault(record) for record in records] == [""] * 5
    assert {record["signature"]["key"] for record in records} == {answers["key"]}
    assert f'signing_key="{answers["key"]}"' in answers["metrics"]


@pytest.mark.parametrize("name", ["record", "form", "error"])
def test_an_answer_in_a_file_is_checked_against_its_image(opal, exact_model, folder, answers, name):
    document = json.loads(answers[name])
    path = folder / f"{name}.json"
    # any layout
    path.write_text(json.dumps(document, indent=2))
    (folder / "in/broken").write_bytes(b"no image")
    images = [folder / "in/broken"] if name == "error" else [folder / "in/001.png", folder / "in/000.png"]

    def verify(*images):
        fixed = ("--model", exact_model, "--public-key", folder / "public.pem", "--device", "cpu")
        return opal("verify", path, *images, *fixed)

    done = check(verify(*images))
    assert "1 of 1 records match the model" in done.stderr
    assert "The signatures of 1 of 1 records are valid" in done.stderr
    if name == "record":
        assert "the record names no image: list the image" in check(verify(), 3).stderr.splitlines()[-1]
        assert "list the image" in check(verify(folder / "in/001.png"), 3).stderr.splitlines()[-1]
        path.write_text(json.dumps({**document, "margin": 0.5}))
        last = check(verify(*images), 4).stderr.splitlines()[-1]
        assert "changed after it was signed; margin is recorded as 0.5" in last


def test_answers_in_one_file_are_found_by_their_digests(opal, exact_model, folder, answers):
    lines = [json.loads(answers[name]) for name in ("form", "record")]
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for more in (("--all",), ("--sample", "1")):
        done = check(opal("verify", path, folder / "in", "--model", exact_model, "--device", "cpu", *more))
        assert "2 records are signed; their signatures were not checked" in done.stderr
