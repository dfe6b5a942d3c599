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

RAW = {"Inference-Header-Content-Length": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_pictures):
    folder = tmp_path_factory.mktemp("served")
    key = ed25519.Ed25519PrivateKey.generate()
    write(folder / "key.pem", key)
    write(folder / "public.pem", key, public=True)
    make_pictures(folder / "in", 2)
    (folder / "broken").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def records(folder, exact_model):
    """The records of `/explain` and of the explain model, by the way they were sent."""
    data = (folder / "in/000.png").read_bytes()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "parameters": {"content_type": "base64"}}
    document = {"inputs": [{**tensor, "data": [base64.b64encode(data).decode()]}]}
    with serving(exact_model, "--device", "cpu", "--sign", folder / "key.pem") as (_, url):
        infer = f"{url}/v2/models/exact_explain/infer"
        binary = httpx.post(infer, headers=RAW, content=data).content
        records = {
            "record": httpx.post(f"{url}/explain", content=data).json(),
            "form": httpx.post(f"{url}/explain", files={"image": ("a.png", data)}).json(),
            "error": httpx.post(f"{url}/explain", content=b"no image").json()["record"],
            "tensor": json.loads(httpx.post(infer, json=document).json()["outputs"][0]["data"][0]),
            "binary": json.loads(binary[binary.index(b'{"schema"') :]),
        }
        key = httpx.get(f"{url}/v2/models/exact/config").json()["parameters"]["signing_key"]["string_value"]
        assert f'signing_key="{key}"' in httpx.get(f"{url}/metrics").text
        assert {record["signature"]["key"] for record in records.values()} == {key}
    return records


def test_every_answer_is_signed(folder, records):
    public = PublicKeys([folder / "public.pem"])
    assert [public.find_fault(record) for record in records.values()] == [""] * 5


@pytest.mark.parametrize(("name", "image"), [("record", "in/000.png"), ("form", "in/000.png"), ("error", "broken")])
def test_an_answer_in_a_file_is_checked_against_its_image(opal, exact_model, folder, records, name, image):
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps(records[name]) + "\n")

    def verify(*images):
        fixed = ("--model", exact_model, "--public-key", folder / "public.pem", "--device", "cpu")
        return opal("verify", path, *images, *fixed)

    done = check(verify(folder / "in/001.png", folder / image))
    assert "1 of 1 records match the model" in done.stderr
    assert "The signatures of 1 of 1 records are valid" in done.stderr
    if name == "record":
        assert "list the image" in check(verify(), 3).stderr.splitlines()[-1]
        path.write_text(json.dumps({**records[name], "margin": 0.5}) + "\n")
        assert "changed after it was signed" in check(verify(folder / image), 4).stderr.splitlines()[-1]


def test_answers_in_one_file_are_found_by_their_digests(opal, exact_model, folder, records):
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(records[name]) + "\n" for name in ("form", "record")))
    done = check(opal("verify", path, folder / "in", "--model", exact_model, "--device", "cpu", "--all"))
    assert "2 records are signed; their signatures were not checked" in done.stderr
