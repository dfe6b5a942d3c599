"""The Open Inference Protocol, as Triton's own client speaks it."""

import base64
import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import opal_deploy
from opal_deploy.artifact.metadata import TOP_OUTPUTS
from opal_deploy.artifact.outputs import Outputs, select_top
from tests.bright import BrightSession


@pytest.fixture(scope="module")
def server(serving, exact_session):
    with serving({"trees": exact_session, "light": BrightSession()}) as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.host, concurrency=4) as client:
        yield client


def tensor(name, values, datatype, *, binary=True):
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def column(elements):
    return np.array([[element] for element in elements], object)


def test_a_client_learns_what_is_served(client, exact_session):
    assert client.is_server_live() and client.is_server_ready()  # noqa: PT018
    assert client.get_server_metadata()["name"] == "opal-deploy"
    ready = [client.is_model_ready(*model) for model in (("trees", "1"), ("light_explain",), ("trees", "2"))]
    assert ready == [True, True, False]
    described = client.get_model_metadata("trees")
    assert described["versions"] == ["1"]
    shapes = [(part["name"], part["datatype"], part["shape"]) for part in described["inputs"] + described["outputs"]]
    assert shapes == [
        ("images", "UINT8", [-1, 96, 96, 3]), ("logits", "FP32", [-1, 4]), ("argmax", "INT32", [-1, 12]),
        ("scores", "FP32", [-1, 12]),
    ]  # fmt: skip
    assert client.get_server_metadata()["models"] == ["trees", "trees_explain", "light", "light_explain"]


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_pixels_give_the_outputs_of_the_graph(client, exact_session, binary):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 96, 96, 3), np.uint8)
    expected = exact_session.run(pixels).to_arrays()
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in expected]
    found = client.infer("trees", [tensor("images", pixels, "UINT8", binary=binary)], outputs=wanted)
    for name, values in expected.items():
        assert found.as_numpy(name).dtype == values.dtype
        np.testing.assert_allclose(found.as_numpy(name), values, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_inflated(client, algorithm):
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    inputs = [tensor("images", pixels, "UINT8")]
    how = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    plain, compressed = (client.infer("light", inputs, **one).as_numpy("logits") for one in ({}, how))
    np.testing.assert_array_equal(plain, compressed)


def test_files_give_the_records_of_explain_and_a_broken_one_an_error_record(
    client, exact_model, make_pictures, tmp_path
):
    paths = make_pictures(tmp_path, 6)
    paths[2].write_bytes(paths[2].read_bytes()[:300])
    boxes = np.full((6, 4), np.nan, np.float32)
    boxes[1] = (10, 20, 70, 80)
    model = opal_deploy.load(exact_model, device="cpu", threads=1)
    expected = model.predict(paths, boxes=[None, (10, 20, 70, 80), *[None] * 4])
    found = client.infer(
        "trees_explain",
        [
            tensor("image", column([path.read_bytes() for path in paths]), "BYTES"),
            tensor("name", column([str(path).encode() for path in paths[:4]] + [b"a\xff\\", b""]), "BYTES"),
            tensor("box", boxes, "FP32"),
        ],
        request_id="seven",
    )
    assert found.get_response()["id"] == "seven"
    records = [json.loads(text) for text in found.as_numpy("record")[:, 0]]
    assert records[2]["error"]["code"] == "truncated_image"
    for record, other in zip(records, expected, strict=True):
        # no file here gave the digest of the model
        other.pop("model_sha256"), record.pop("model_sha256")
    assert records[5].pop("image") is None
    assert expected[5].pop("image")
    # not UTF-8: escaped as `infer` escapes file names
    assert records[4].pop("image") == "a\\xff\\\\"
    assert expected[4].pop("image")
    assert records == [{**other} for other in expected]


def test_a_picture_may_come_as_base64(server, make_pictures, tmp_path):
    data = make_pictures(tmp_path, 1)[0].read_bytes()
    address = f"{server.url}/v2/models/trees_explain/infer"
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
    stated = {"parameters": {"content_type": "base64"}, "data": [base64.b64encode(data).decode()]}
    # with line breaks, as MIME has it, and as browsers have it
    others = base64.encodebytes(data).decode(), f"data:image/png;base64,{stated['data'][0]}"
    for how in (stated, *({"data": [text]} for text in others)):
        (output,) = httpx.post(address, json={"inputs": [tensor | how]}).json()["outputs"]
        assert output["shape"] == [1, 1]
        assert json.loads(output["data"][0]) == httpx.post(f"{server.url}/explain", content=data).json()
    broken = httpx.post(address, json={"inputs": [tensor | {"data": ["a"]}]})
    assert "base64" in broken.json()["error"]


class TopSession(BrightSession):
    """The same, from a graph that lists its best class alone."""

    def __init__(self):
        super().__init__()
        self.metadata = replace(self.metadata, outputs=TOP_OUTPUTS, top_k=1)

    def run(self, images):
        outputs = super().run(images)
        return Outputs(np.empty((len(images), 0), np.float32), top=select_top(outputs, self.metadata.class_map, 1))


def test_a_graph_that_lists_its_best_classes_gives_these(serving):
    with serving({"light": TopSession()}, top=1) as running, triton.InferenceServerClient(running.host) as client:
        described = client.get_model_metadata("light")["outputs"]
        found = client.infer("light", [tensor("images", np.full((3, 32, 32, 3), 200, np.uint8), "UINT8")])
    for output in described:
        values = found.as_numpy(output["name"])
        assert list(values.shape) == [3, *output["shape"][1:]]
        assert output["datatype"] == {"int32": "INT32", "float32": "FP32"}[str(values.dtype)]
    assert found.as_numpy("top_classes").tolist() == [[1]] * 3


def test_what_is_not_there_is_said_in_one_line(client):
    pixels = tensor("images", np.zeros((1, 32, 32, 3), np.uint8), "UINT8")
    with pytest.raises(InferenceServerException, match="model 'none' not found; available: trees, trees_explain"):
        client.infer("none", [pixels])
    with pytest.raises(InferenceServerException, match="/v2/systemsharedmemory/status: Not Found"):
        client.get_system_shared_memory_status()
