"""The Open Inference Protocol, as Triton's own client speaks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import opal_deploy
from opal_deploy.runtime.onnx_session import OnnxSession
from tests.inference.bright import BrightSession


@pytest.fixture(scope="module")
def server(serving: Callable, exact_session: OnnxSession) -> Iterator[Any]:
    with serving({"trees": exact_session, "light": BrightSession()}) as running:
        yield running


@pytest.fixture
def client(server: Any) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.host, concurrency=4) as client:
        yield client


def tensor(name: str, values: np.ndarray, datatype: str, *, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def column(elements: list[bytes]) -> np.ndarray:
    return np.array([[element] for element in elements], object)


def test_a_client_learns_what_is_served(client: triton.InferenceServerClient, exact_session: OnnxSession) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["name"] == "opal-deploy"
    assert client.is_model_ready("trees", "1")
    assert client.is_model_ready("light_explain")
    assert not client.is_model_ready("trees", "2")
    assert client.get_model_metadata("trees") == {
        "name": "trees",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": [-1, 96, 96, 3]}],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "argmax", "datatype": "INT32", "shape": [-1, 12]},
            {"name": "scores", "datatype": "FP32", "shape": [-1, 12]},
        ],
    }
    assert [model["name"] for model in client.get_model_repository_index()] == [
        "trees", "trees_explain", "light", "light_explain",
    ]  # fmt: skip


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_pixels_give_the_outputs_of_the_graph(
    client: triton.InferenceServerClient, exact_session: OnnxSession, binary: bool
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 96, 96, 3), np.uint8)
    expected = exact_session.run(pixels).to_arrays()
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in expected]
    found = client.infer("trees", [tensor("images", pixels, "UINT8", binary=binary)], outputs=wanted)
    for name, values in expected.items():
        assert found.as_numpy(name).dtype == values.dtype
        np.testing.assert_allclose(found.as_numpy(name), values, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_inflated(client: triton.InferenceServerClient, algorithm: str) -> None:
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    plain, compressed = (
        client.infer(
            "light",
            [tensor("images", pixels, "UINT8")],
            request_compression_algorithm=one,
            response_compression_algorithm=one,
        ).as_numpy("logits")
        for one in (None, algorithm)
    )
    np.testing.assert_array_equal(plain, compressed)


def test_files_give_the_records_of_explain_and_a_broken_one_an_error_record(
    client: triton.InferenceServerClient, exact_model: Path, make_pictures: Callable, tmp_path: Path
) -> None:
    paths: list[Path] = make_pictures(tmp_path, 6)
    paths[2].write_bytes(paths[2].read_bytes()[:300])
    boxes = np.full((6, 4), np.nan, np.float32)
    boxes[1] = (10, 20, 70, 80)
    model = opal_deploy.load(exact_model, device="cpu", threads=1)
    expected = model.explain(paths, boxes=[None, (10, 20, 70, 80), *[None] * 4])
    found = client.infer(
        "trees_explain",
        [
            tensor("image", column([path.read_bytes() for path in paths]), "BYTES"),
            tensor("name", column([str(path).encode() for path in paths[:5]] + [b""]), "BYTES"),
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
    assert records == [{**other} for other in expected]


def test_what_is_not_there_is_said_in_one_line(client: triton.InferenceServerClient) -> None:
    pixels = tensor("images", np.zeros((1, 32, 32, 3), np.uint8), "UINT8")
    with pytest.raises(InferenceServerException, match="model 'none' found, one of trees, trees_explain"):
        client.infer("none", [pixels])
    with pytest.raises(InferenceServerException, match="there is no shared memory; send tensors"):
        client.get_system_shared_memory_status()
