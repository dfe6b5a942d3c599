"""A repository of `export --triton` in a real tritonserver: the records of `infer`, over HTTP and gRPC.

The config of the tensor model is the exported one; a stand-in under the name of NVIDIA's ONNX Runtime backend runs it.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

import opal_deploy
from tests.triton.server import needs_tritonserver, run_server

pytestmark = needs_tritonserver
GOLDEN = Path(__file__).parents[1] / "golden/0.1.0"
OTHER_HEADS = ("pip", "proto")
PROTOCOLS = pytest.mark.parametrize("protocol", [http, grpc], ids=["http", "grpc"])


@pytest.fixture(scope="module")
def server(exact_model, edited_model, opal, tmp_path_factory):
    """A server with `exact_model`, `edited_model` and golden files of other heads, and two that must be refused."""
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "models"
    for name, model in (
        ("opal", exact_model), ("other", exact_model), ("newer", exact_model), ("edited", edited_model),
        *((kind, GOLDEN / f"{kind}.onnx") for kind in OTHER_HEADS),
    ):  # fmt: skip
        assert opal("export", model, "--triton", repository, "--name", name, "--no-verify").returncode == 0
    # as if the tensor model were another one than the one that was exported with it
    path = repository / "other_explain/1/metadata.json"
    metadata = json.loads(path.read_text("utf-8"))
    metadata["test_vectors"]["images"].reverse()
    path.write_text(json.dumps(metadata))
    path = repository / "newer_explain/1/metadata.json"
    path.write_text(path.read_text("utf-8").replace('"schema": 1', '"schema": 3'))
    served = [f"{name}{suffix}" for name in ("opal", "other", "edited", *OTHER_HEADS) for suffix in ("", "_explain")]
    with run_server(repository, served, folder) as running:
        yield running


def as_input(protocol, name, array, kind):
    tensor = protocol.InferInput(name, array.shape, kind)
    tensor.set_data_from_numpy(array)
    return tensor


def explain(client, protocol, files, names=None, boxes=None, model="opal_explain"):
    """Return the records of image files."""
    inputs = [as_input(protocol, "image", np.array(files, np.object_)[:, None], "BYTES")]
    if names is not None:
        encoded = [name if isinstance(name, bytes) else name.encode() for name in names]
        inputs.append(as_input(protocol, "name", np.array(encoded, np.object_)[:, None], "BYTES"))
    if boxes is not None:
        inputs.append(as_input(protocol, "box", np.array(boxes, np.float32), "FP32"))
    return [json.loads(line) for line in client.infer(model, inputs).as_numpy("record")[:, 0]]


@PROTOCOLS
def test_the_tensor_model_answers_as_onnx_runtime(protocol, server, exact_session):
    images = np.random.default_rng(0).integers(0, 256, (3, 96, 96, 3), np.uint8)
    with server.client(protocol) as client:
        found = client.infer("opal", [as_input(protocol, "images", images, "UINT8")])

    expected = exact_session.run(images)
    assert np.array_equal(found.as_numpy("logits"), expected.logits)
    assert np.array_equal(found.as_numpy("argmax"), expected.argmax)
    assert np.array_equal(found.as_numpy("scores"), expected.scores)


def test_concurrent_clients_get_the_records_of_infer(server, exact_model, make_pictures, tmp_path):
    paths = make_pictures(tmp_path / "images", 12)
    paths[5].write_bytes(b"not an image")
    expected = opal_deploy.load(exact_model, threads=1).predict(paths)
    groups = [paths[start : start + size] for start, size in ((0, 1), (1, 7), (8, 4))]

    def ask(group):
        # a client belongs to one thread
        with server.client(http) as client:
            return explain(client, http, [path.read_bytes() for path in group], [*map(str, group)])

    with ThreadPoolExecutor(len(groups)) as threads:
        records = [record for group in threads.map(ask, groups) for record in group]

    assert [record["status"] for record in records].count("error") == 1
    assert records == expected


@pytest.mark.parametrize("name", ["edited", *OTHER_HEADS])
def test_an_edited_model_and_other_heads_answer_as_in_this_process(name, server, edited_model, make_pictures, tmp_path):
    files = [path.read_bytes() for path in make_pictures(tmp_path, 3)]
    with server.client(grpc) as client:
        found = explain(client, grpc, files, model=f"{name}_explain")
    model = edited_model if name == "edited" else GOLDEN / f"{name}.onnx"
    assert found == opal_deploy.load(model, threads=1).predict(files)


def test_images_may_have_no_names_and_boxes(server, exact_model, make_pictures, tmp_path):
    files = [path.read_bytes() for path in make_pictures(tmp_path, 3)]
    whole = (np.nan,) * 4
    with server.client(grpc) as client:
        found = explain(client, grpc, files, ["a", "", b"c\xff"], [(10, 20, 60, 90), whole, (200, 0, 300, 10)])
        unnamed = explain(client, grpc, files)

    expected = opal_deploy.load(exact_model, threads=1).predict(
        files, boxes=[(10, 20, 60, 90), None, (200, 0, 300, 10)]
    )
    assert [record.pop("image") for record in found] == ["a", None, "c\\xff"]
    assert found == [{key: value for key, value in record.items() if key != "image"} for record in expected]
    assert found[2]["error"]["code"] == "bad_box"
    assert unnamed[1] == expected[1]


def test_a_model_that_is_not_the_exported_one_answers_nothing(server, make_pictures, tmp_path):
    (path,) = make_pictures(tmp_path, 1)
    with server.client(grpc) as client:
        with pytest.raises(grpc.InferenceServerException, match="test vectors"):
            explain(client, grpc, [path.read_bytes()], model="other_explain")
        # metadata of another version is refused when the model is loaded
        with pytest.raises(grpc.InferenceServerException, match="schema 3"):
            client.load_model("newer_explain")


def test_a_broken_request_harms_no_other(server, make_pictures, tmp_path):
    (path,) = make_pictures(tmp_path, 1)
    lengthless = http.InferInput("image", [1, 1], "BYTES")
    lengthless._raw_data = b"\xff\xff\xff\x7fpicture"
    lengthless._parameters["binary_data_size"] = len(lengthless._raw_data)
    many = [path.read_bytes()] * 65
    with server.client(http) as client:
        with pytest.raises(http.InferenceServerException, match="incomplete"):
            client.infer("opal_explain", [lengthless])
        with pytest.raises(http.InferenceServerException, match=r"must be <= 64"):
            explain(client, http, many)

        with pytest.raises(http.InferenceServerException, match="expected at most 4096"):
            explain(client, http, many[:1], ["n" * 5000])

        assert [record["status"] for record in explain(client, http, [path.read_bytes()])] == ["ok"]
