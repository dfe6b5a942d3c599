"""Stored images and outputs: exact in, exact out; damage is one line."""

import json
from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact import test_vectors
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference, find_top2_margin
from opal_deploy.errors import ArtifactError

RNG = np.random.default_rng(0)
REFERENCE = Reference(
    RNG.integers(0, 256, (3, 32, 48, 3), dtype=np.uint8),
    Outputs(
        RNG.standard_normal((3, 4)).astype(np.float32),
        RNG.integers(0, 2, (3, 20)).astype(np.int32),
        np.nextafter(RNG.random((3, 20)).astype(np.float32), np.float32(2)),
    ),
    np.where(RNG.random((3, 20)) < 0.1, np.inf, RNG.random((3, 20))).astype(np.float16),
)


def _assert_equal(one, other):
    def parts(reference):
        outputs = reference.outputs
        arrays = (reference.images, outputs.logits, outputs.argmax, outputs.scores, reference.top2_margin)
        return [None if array is None else (array.dtype, array.shape, array.tobytes()) for array in arrays]

    assert parts(one) == parts(other)


def test_a_lead_is_relative_to_the_largest_cell():
    cells = np.array([[[0.25, 0.5, 0.375], [-4.0, -2.0, -3.0], [1.0, 1.0, 0.0]]], np.float32)
    assert find_top2_margin(cells).tolist() == [[0.25, 0.25, 0.0]]
    assert np.isinf(find_top2_margin(cells[..., :1])).all()


SPECIAL = np.array([[np.inf, -np.inf, np.float32(1e-45), -0.0]] * 3, np.float32)


@pytest.mark.parametrize(
    "reference",
    [
        REFERENCE,
        Reference(REFERENCE.images, Outputs(REFERENCE.outputs.logits)),
        replace(REFERENCE, outputs=replace(REFERENCE.outputs, logits=SPECIAL)),
    ],
    ids=["evidence", "logits alone", "special values"],
)
def test_images_and_outputs_come_back_exactly_through_plain_json(reference):
    document = test_vectors.pack(reference)
    assert json.loads(json.dumps(document)) == document
    _assert_equal(reference, test_vectors.unpack(document, "m"))
    del document["logits"]
    with pytest.raises(ArtifactError, match="damaged"):
        test_vectors.unpack(document, "m.onnx")


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.parametrize(
    "change",
    [
        {"images": []}, {"images": ["not base64!"]}, {"images": [PNG[:40]]}, {"images": 3}, {"logits": {}},
        {"logits": {"dtype": "float32", "shape": [3, 4], "zlib": "AAAA"}},
        {"logits": {"dtype": "object", "shape": [3, 4], "zlib": ""}},
        {"logits": {"dtype": "float32", "shape": [99, 4], "zlib": "eJwDAAAAAAE="}},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_vectors_are_refused_in_one_line(change):
    with pytest.raises(ArtifactError) as error:
        test_vectors.unpack({**test_vectors.pack(REFERENCE), **change}, "m.onnx")
    assert str(error.value).startswith("m.onnx: ")
    assert "\n" not in str(error.value)
