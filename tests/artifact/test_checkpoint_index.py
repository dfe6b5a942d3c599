"""A checkpoint's contents read without torch: as torch reads them, and nothing in the file is run."""

import io
import random
import zipfile

import pytest
import torch

from opal_deploy.artifact.checkpoint_index import TensorInfo, read_index
from opal_deploy.errors import ArtifactError
from opal_deploy.model import checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from tests.builders import Payload, build_anchors


def _save(path, document, **options):
    torch.save(document, path, **options)
    return path


@pytest.fixture(scope="module")
def network():
    return OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 3, (64, 64)))


def _assert_same_tensors(state, expected):
    assert list(state) == list(expected)
    for key, tensor in expected.items():
        assert isinstance(state[key], TensorInfo)
        assert state[key].shape == tuple(tensor.shape)


def test_it_agrees_with_torch(network, tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save(path, checkpoint.Checkpoint(network, ["a", "b", "ü"], metrics={"x": 0.5}))
    found, expected = read_index(path), torch.load(path, weights_only=True)
    _assert_same_tensors(found.pop("state_dict"), expected.pop("state_dict"))
    assert found == expected
    state = {f"backbone.{key}": value for key, value in network.backbone.body.state_dict().items()}
    state["final_conv_layer.weight"] = torch.nn.Parameter(torch.zeros(15, 1024, 1, 1))
    state["classifier.prototypes"] = build_anchors(3, 5)
    # the second is an OrderedDict with an attribute of torch's
    for document in (state, network.state_dict()):
        _assert_same_tensors(read_index(_save(path, document)), torch.load(path, weights_only=True))


def test_tensors_of_any_usual_type_and_views_have_their_own_shapes(tmp_path):
    base = torch.zeros(10, 10)
    document = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.bool)}
    document |= {"scalar": torch.zeros(()), "view": base[2:5, ::2], "turned": base[:3].T}
    index = read_index(_save(tmp_path / "c.pt", document))
    assert [info.shape for info in index.values()] == [(2, 3)] * 3 + [(), (3, 5), (10, 3)]


def test_code_is_refused_and_not_run(tmp_path):
    path = _save(tmp_path / "c.pt", {"x": Payload(tmp_path / "executed")})
    with pytest.raises(ArtifactError, match="refused"):
        read_index(path)
    assert not (tmp_path / "executed").exists()
    for name in ("builtins eval", "os system", "torch load", "torch.storage _load_from_bytes", "collections Counter"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("c/data.pkl", b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n.")
        with pytest.raises(ArtifactError, match="refused"):
            read_index(path)


def test_a_flipped_bit_never_ends_in_another_error(tmp_path):
    path = _save(tmp_path / "c.pt", {"a": torch.arange(6.0), "b": [1, "x"]})
    content, source, refused = path.read_bytes(), random.Random(0), 0
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        try:
            read_index(path)
        except ArtifactError:
            refused += 1
    assert refused > 100


def test_other_zips_and_files_are_refused(tmp_path):
    other, legacy, path = io.BytesIO(), io.BytesIO(), tmp_path / "c.pt"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "no checkpoint")
    torch.save({"x": torch.zeros(1)}, legacy, _use_new_zipfile_serialization=False)
    for content in (other.getvalue(), legacy.getvalue(), b"text", b""):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"torch\.save"):
            read_index(path)
    with pytest.raises(ArtifactError, match=r"nowhere\.pt"):
        read_index(tmp_path / "nowhere.pt")
    with pytest.raises(ArtifactError, match="expected a dictionary"):
        read_index(_save(path, [1]))
