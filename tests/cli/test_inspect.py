"""`opal-deploy inspect`: the contents of a model file, or one line that says why it cannot be read."""

import json

import torch

from tests.cli.calls import one_line


def test_an_exported_model_is_described_and_json_goes_to_stdout_alone(opal, exact_model):
    shown = opal("inspect", exact_model).stdout
    for part in ("4 classes, m = 3, distance l2, grid 3x3", "matches the file", "exact.pt (opal-deploy)", "verified"):
        assert part in shown
    done = opal("inspect", exact_model, "--json")
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert (document["kind"], document["intact"], document["opset"]) == ("onnx", True, 17)
    assert document["metadata"]["class_names"][3] == "Übersee-Eiche"
    assert "it can see 167 of 96 pixels" in shown
    assert "warning: a cell sees the whole image" in shown
    assert document["metadata"]["receptive_field"]["effective"] is None
    # megabytes of test images are nothing to read
    assert document["metadata"]["test_vectors"] == {"images": 4}


def test_a_checkpoint_of_ours_is_described(opal, exact_model):
    document = json.loads(opal("inspect", exact_model.with_suffix(".pt"), "--json").stdout)
    assert document["kind"] == "checkpoint"
    assert document["config"]["backbone"] == "timm:test_resnet"
    assert document["tensors"]["head.projection.weight"] == [12, 96, 1, 1]


def test_a_damaged_model_is_shown_as_damaged(opal, exact_model, tmp_path):
    data = bytearray(exact_model.read_bytes())
    data[len(data) // 4] ^= 1
    (tmp_path / "m.onnx").write_bytes(data)
    assert "DOES NOT MATCH" in opal("inspect", tmp_path / "m.onnx").stdout


def test_a_checkpoint_of_another_program_or_with_parts_missing_is_refused(opal, tmp_path):
    other = {"config": {"lr": 1}, "state_dict": {"a": torch.zeros(2)}}
    cut = {"format": "opal-deploy checkpoint", "state_dict": {}, "config": {}}
    for content, message in ((other, "no tensors in it"), (cut, "an opal-deploy checkpoint with parts missing")):
        torch.save(content, tmp_path / "m.pt")
        assert message in one_line(opal("inspect", tmp_path / "m.pt"))


def test_a_card_names_what_was_not_measured(opal, exact_model):
    card = opal("inspect", exact_model, "--card").stdout
    assert "metrics: not recorded in the file" in card
    assert "\nlicense: other" in card
