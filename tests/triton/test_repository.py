"""`export --triton`: the files of the repository, as protobuf and Triton's own description of a config read them."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as model_config

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import write_sidecar
from opal_deploy.errors import UsageError
from opal_deploy.triton.explain_model import _parse_parameters
from tests.builders import build_sidecar
from tests.cli.calls import check, one_line


def read_config(model):
    """Return the model's config; a field that Triton does not know raises."""
    return text_format.Parse((model / "config.pbtxt").read_text("utf-8"), model_config.ModelConfig())


def shapes(tensors):
    return {t.name: (model_config.DataType.Name(t.data_type), list(t.dims)) for t in tensors}


def test_an_onnx_file_becomes_two_models(exact_model, opal, tmp_path):
    done = check(opal("export", exact_model, "--triton", tmp_path / "models", "--json", blocked=("torch", "onnx")))
    tensor, explain = (tmp_path / "models" / name for name in json.loads(done.stdout)["models"])
    config, metadata = read_config(tensor), onnx_file.read_metadata(exact_model)
    assert (config.name, config.backend, config.max_batch_size) == ("opal", "onnxruntime", 64)
    assert shapes(config.input) == {"images": ("TYPE_UINT8", [96, 96, 3])}
    outputs = {"logits": ("TYPE_FP32", [4]), "argmax": ("TYPE_INT32", [12]), "scores": ("TYPE_FP32", [12])}
    assert shapes(config.output) == outputs
    assert {sample.batch_size for sample in config.model_warmup} == {1, 8, 64}
    assert (tensor / "1/model.onnx").read_bytes() == exact_model.read_bytes()
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters["model_sha256"] == hashlib.sha256(exact_model.read_bytes()).hexdigest()
    assert json.loads(parameters["class_names"]) == list(metadata.class_names)
    config = read_config(explain)
    assert (config.name, config.backend) == ("opal_explain", "python")
    text = ("TYPE_STRING", [1])
    expected = {"image": text, "name": text, "box": ("TYPE_FP32", [4]), "record": text}
    assert shapes([*config.input, *config.output]) == expected
    assert [tensor.optional for tensor in config.input] == [False, True, True]


def test_models_are_replaced_only_when_asked_to_and_only_ours(exact_model, map_model, opal, tmp_path):
    command = ("export", exact_model, "--triton", tmp_path, "--no-verify")
    foreign = tmp_path / "birds"
    foreign.mkdir()
    (foreign / "config.pbtxt").write_text('backend: "pytorch"')

    assert opal(*command).returncode == 0
    # of a checkpoint it is asked before the export
    for source in (map_model, exact_model.with_suffix(".pt")):
        assert "--overwrite" in one_line(opal("export", source, *command[2:]))
    assert opal("export", map_model, *command[2:], "--overwrite").returncode == 0
    assert (tmp_path / "opal/1/model.onnx").read_bytes() == map_model.read_bytes()
    assert "did not write" in one_line(opal(*command, "--name", "birds", "--overwrite"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["birds", "opal", "opal_explain"]


def test_a_failed_write_leaves_the_old_models(exact_model, opal, tmp_path, monkeypatch):
    def rename(path, target):
        if path.name == "opal_explain" and path.parent.name.endswith(".part"):
            raise OSError(28, "No space left on device")
        return actual(path, target)

    actual = Path.rename
    assert opal("export", exact_model, "--triton", tmp_path / "models", "--no-verify").returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()}
    monkeypatch.setattr(Path, "rename", rename)
    assert "No space left" in one_line(
        opal("export", exact_model, "--triton", tmp_path / "models", "--no-verify", "--overwrite")
    )
    assert {path: path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()} == before
    assert len(list((tmp_path / "models").iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"builder": {"name": "tensorrt-rtx", "version": "1.7.0", "cuda": 13}}, "tensorrt-rtx"),
        ({"options": {"batch": [4, 4, 4]}}, "batches from 4"),
    ],
)
def test_an_engine_is_served_within_its_batch_sizes_or_refused(changes, reason, exact_model, opal, tmp_path):
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"plan")
    write_sidecar(engine, build_sidecar(engine, onnx_file.read_metadata(exact_model), **changes))

    done = opal("export", engine, "--triton", tmp_path / "models", "--name", "birds")

    if reason is not None:
        assert reason in one_line(done)
        assert not (tmp_path / "models").exists()
        return
    check(done)
    config = read_config(tmp_path / "models/birds")
    assert (config.backend, config.max_batch_size) == ("tensorrt", 4)
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 4]
    assert (tmp_path / "models/birds/1/model.plan").read_bytes() == b"plan"
    assert read_config(tmp_path / "models/birds_explain").parameters["model"].string_value == "birds"


def test_the_explain_model_needs_the_base_install_only():
    absent = dict.fromkeys(("torch", "onnx", "onnxruntime", "tritonclient", "google.protobuf"))
    code = f"import sys; sys.modules.update({absent}); import opal_deploy.triton.explain_model"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "text", "word"), [("top", "0", "top"), ("decode_timeout", "soon", "decode_timeout"), ("unknown", "x", "x")]
)
def test_edited_parameters_are_read_or_refused_in_one_line(name, text, word):
    values = {
        "model": "opal", "model_sha256": "ab", "top": "5", "max_pixels": "9", "decode_workers": "1",
        "decode_timeout": "null", "min_margin": "0.25", "unknown": "null",
    }  # fmt: skip

    def parse(**changes):
        texts = {key: {"string_value": value} for key, value in {**values, **changes}.items()}
        return _parse_parameters({"max_batch_size": 8, "parameters": texts})[1]

    options = parse()
    assert (options.batch, options.top, options.decode_timeout) == (8, 5, None)
    assert (options.decision.min_margin, options.decision.unknown) == (0.25, None)
    with pytest.raises(UsageError, match=word):
        parse(**{name: text})
