"""`opal-deploy inspect`: the contents of a model file, or one line that says why it cannot be read."""

import json

import pytest
import torch

from tests.cli.calls import one_line


def test_an_exported_model_is_described_and_json_goes_to_stdout_alone(opal, exact_model):
    shown = opal("inspect", exact_model).stderr
    for part in ("4 classes, m = 3, distance l2, grid 3x3", "matches the file", "exact.pt (opal-deploy)", "verified"):
        assert part in shown
    done = opal("inspect", exact_model, "--json")
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert (document["kind"], document["intact"], document["opset"]) == ("onnx", True, 17)
    assert document["metadata"]["class_names"][3] == "Übersee-Eiche"
    assert "it can see 527 of 96 pixels" in shown
    assert "warning: a cell sees the whole image" in shown
    assert document["metadata"]["receptive_field"]["effective"] is None
    # megabytes of test images are nothing to read
    assert document["metadata"]["test_vectors"] == {"images": 4}


def test_a_checkpoint_of_ours_is_described(opal, exact_model):
    document = json.loads(opal("inspect", exact_model.with_suffix(".pt"), "--json").stdout)
    assert document["kind"] == "checkpoint"
    assert document["config"]["backbone"] == "shufflenet_v2_x0_5"
    assert document["tensors"]["head.projection.weight"] == [12, 1024, 1, 1]


def test_a_damaged_model_is_shown_as_damaged(opal, exact_model, tmp_path):
    data = bytearray(exact_model.read_bytes())
    data[len(data) // 4] ^= 1
    (tmp_path / "m.onnx").write_bytes(data)
    assert "DOES NOT MATCH" in opal("inspect", tmp_path / "m.onnx").stderr


@pytest.mark.parametrize(
    ("file", "write", "message"),
    [
        ("m.onnx", lambda path: None, "no such file; expected an ONNX file, an engine or a checkpoint"),
        ("m.txt", lambda path: path.write_text("x"), "expected .onnx, .engine, .pt or .pth"),
        ("m.pt", lambda path: torch.save({"config": {"lr": 1}, "state_dict": {"a": torch.zeros(2)}}, path),
         "no tensors in it; expected a checkpoint or a state dict"),
        ("m.pt", lambda path: torch.save({"format": "opal-deploy checkpoint", "state_dict": {}, "config": {}}, path),
         "an opal-deploy checkpoint with parts missing; train or copy it again"),
    ],
    ids=["missing", "another kind", "another program's", "parts missing"],
)  # fmt: skip
def test_what_is_no_model_is_refused_in_one_line(opal, tmp_path, file, write, message):
    write(tmp_path / file)
    line = one_line(opal("inspect", tmp_path / file))
    assert line.startswith(f"opal-deploy: {tmp_path / file}: ")
    assert message in line


def test_a_card_names_what_was_not_measured(opal, exact_model):
    assert "metrics: not recorded in the file" in opal("inspect", exact_model, "--card").stdout
