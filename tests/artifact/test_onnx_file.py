"""ONNX files read without onnx, and the digest that finds every damaged byte."""

import hashlib
import os
import random
import re
import shutil
from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto, helper

from opal_deploy.artifact import onnx_file
from opal_deploy.errors import ArtifactError


def _check(path):
    """As a session does before it loads anything."""
    onnx_file.check_digest(path, onnx_file.read_metadata(path))


def _passes(path):
    try:
        _check(path)
    except ArtifactError:
        return False
    return True


def test_the_reader_agrees_with_onnx_on_a_real_export(exported):
    header, model = onnx_file.read_header(exported), onnx.load(exported)
    assert header.ir_version == model.ir_version
    assert header.opset == model.opset_import[0].version
    assert model.producer_name == "opal-deploy"
    assert header.properties == {entry.key: entry.value for entry in model.metadata_props}


def test_the_default_operator_set_counts_and_properties_are_kept_apart(tmp_path):
    sets = [helper.make_opsetid("com.microsoft", 99), helper.make_opsetid("", 20)]
    model = helper.make_model(helper.make_graph([], "g", [], []), opset_imports=sets, ir_version=10)
    properties = {"a": "1", "b": "ü" * 300, "c": ""}
    helper.set_model_props(model, properties)
    onnx.save(model, tmp_path / "m.onnx")
    header = onnx_file.read_header(tmp_path / "m.onnx")
    assert (header.opset, header.properties) == (20, properties)


def test_files_that_are_not_ours_are_refused_in_one_line(tmp_path):
    path, source = tmp_path / "m.onnx", random.Random(0)
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [])), path)
    with pytest.raises(ArtifactError, match="another tool"):
        onnx_file.read_metadata(path)
    formats = [b"", b"\0", b"hello world", b"\xff" * 100]
    for content in formats + [source.randbytes(length) for length in (1, 5, 50, 500) * 10]:
        path.write_bytes(content)
        with pytest.raises(ArtifactError) as error:
            onnx_file.read_metadata(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ArtifactError, match="no such file"):
        onnx_file.read_metadata(tmp_path / "nowhere.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(ArtifactError, match="a pipe or a device"):
        onnx_file.read_header(tmp_path / "pipe.onnx")


def test_the_digest_is_sha256_of_the_file_with_its_own_field_zeroed(exported):
    _check(exported)
    stated = onnx_file.read_metadata(exported).file_sha256
    content = exported.read_bytes()
    assert content.count(stated.encode()) == 1
    assert hashlib.sha256(content.replace(stated.encode(), b"0" * 64)).hexdigest() == stated


def test_a_cut_or_longer_file_is_detected(exported, tmp_path):
    content, path = exported.read_bytes(), tmp_path / "m.onnx"
    for share in (0.01, 0.3, 0.6, 0.9, 0.999):
        path.write_bytes(content[: int(share * len(content))])
        assert not _passes(path)
    # a field of varint type that no reader knows: still valid protobuf
    path.write_bytes(content + b"\xf8\x7f\x01")
    with pytest.raises(ArtifactError, match="digest"):
        _check(path)


def test_every_flipped_bit_is_detected(exported, tmp_path):
    content, source, path = exported.read_bytes(), random.Random(0), tmp_path / "m.onnx"
    (metadata,) = [m.start() for m in re.finditer(rb'\{"class_names"', content)]
    (digest,) = [m.start() for m in re.finditer(rb'"file_sha256": "[0-9a-f]{64}"', content) if m.start() > metadata]
    positions = {
        *range(64),  # the header
        *range(len(content) - 64, len(content)),
        *range(metadata - 16, metadata + 300),  # names, head, sizes
        *range(digest - 100, digest + 100),
        *source.sample(range(len(content)), 300),
    }
    path.write_bytes(content)
    undetected = []
    with path.open("r+b", buffering=0) as stream:
        for position in sorted(positions):
            for value in (content[position] ^ 1 << source.randrange(8), content[position]):
                stream.seek(position)
                stream.write(bytes([value]))
                if value != content[position] and _passes(path):
                    undetected.append(position)
    assert not undetected
    assert _passes(path)


def test_a_file_without_a_digest_is_refused_and_one_with_a_digest_gets_no_second(exported, tmp_path):
    content, path = exported.read_bytes(), tmp_path / "m.onnx"
    path.write_bytes(content.replace(onnx_file.read_metadata(exported).file_sha256.encode(), b"0" * 64))
    assert not _passes(path)
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="no blank digest"):
        onnx_file.embed_digest(path)


def test_keys_of_a_later_version_are_kept_where_a_file_is_written_again(exported, tmp_path):
    path = tmp_path / "later.onnx"
    shutil.copy(exported, path)
    # the marker that the digest is found by
    invented = {"invented": {"file_sha256": "0" * 64}}
    onnx_file.rewrite_metadata(path, replace(onnx_file.read_metadata(path), unknown=invented))
    _check(path)
    onnx_file.rewrite_metadata(path, replace(onnx_file.read_metadata(path), crop="boxes"))
    _check(path)
    assert onnx_file.read_metadata(path).unknown == invented


def test_weights_in_other_files_are_refused_since_no_digest_covers_them(exported, tmp_path):
    model = onnx.load(exported)
    onnx.save(model, tmp_path / "side.onnx", save_as_external_data=True, location="side.bin", size_threshold=0)
    with pytest.raises(ArtifactError, match="other files"):
        onnx_file.read_metadata(tmp_path / "side.onnx")


def test_a_graph_that_may_run_for_any_time_is_refused_before_it_is_loaded(exported, tmp_path):
    def save(change):
        model = onnx.load(exported)
        change(model)
        onnx.save(model, tmp_path / "m.onnx")
        return tmp_path / "m.onnx"

    body = helper.make_graph([], "body", [], [])
    loop = helper.make_node("Loop", ["trips", ""], ["z"], body=body)
    function = helper.make_function("", "Relu", ["x"], ["y"], [], [helper.make_opsetid("", 17)])
    weight = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    constant = helper.make_node("Constant", [], ["w"], value=weight)
    for change, words in (
        (lambda model: model.graph.node.append(loop), "Loop"),
        (lambda model: model.functions.append(function), "functions"),
        (lambda model: model.graph.node.append(constant), "other files"),
    ):
        with pytest.raises(ArtifactError, match=words):
            onnx_file.read_metadata(save(change))
