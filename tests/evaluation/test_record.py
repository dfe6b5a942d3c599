"""The evaluation of a model's evidence: kept in every kind of model file, and told in one line."""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from opal_deploy.artifact import engine_file, onnx_file
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.measurements import list_evaluation
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.inputs import check_model
from opal_deploy.evaluation.record import build_evaluation, record_measurements
from opal_deploy.model import checkpoint
from tests.builders import build_sidecar

# as `evaluate --json` prints it, without what is not kept
DOCUMENT = {
    "model": "run/best.pt", "session": "PyTorch on cpu, fp32", "boxes": True, "test_images": 243, "test_accuracy": 0.8,
    "part_purity": 0.6,
    "pointing_game": {
        "object": None, "part": {"mean": 0.634, "low": 0.6, "high": 0.667, "count": 201, "random": 0.141},
        "distinguishing_part": None, "images": 201, "rules": "",
    },
    "faithfulness": {
        "images": 60, "random_control": "random cells",
        "rankings": [
            {"fill": "blur", "ranking": "contribution", "class_kept": 0.5},
            {"fill": "blur", "ranking": "random", "class_kept": 0.98, "advantage": {"drop": {"mean": 0.3}}},
        ],
    },
}  # fmt: skip
CUB = DataSet(Path("/data/cub_mini"), "cub", [], [], [], [], crop="boxes")
EVALUATION = build_evaluation(DOCUMENT, CUB, "test")


def test_the_document_keeps_the_figures_of_the_evidence():
    assert EVALUATION["pointing_game"]["part"] == DOCUMENT["pointing_game"]["part"]
    (blur,) = EVALUATION["faithfulness"]["removal"]
    assert (blur["changed"], blur["changed_random"]) == (0.5, pytest.approx(0.02))
    assert blur["drop_beyond_random"] == {"mean": 0.3}
    assert (EVALUATION["data"], EVALUATION["images"], EVALUATION["part_purity"]) == ("cub_mini", 243, 0.6)
    # images that have no boxes are not cropped
    assert not build_evaluation(DOCUMENT, replace(CUB, crop=None), "test")["boxes"]


def describe(model, *left_out):
    evaluation = {**EVALUATION, "when": "2026-11-22T09:00:00+00:00", "opal_deploy": "9"}
    return dict(list_evaluation({k: v for k, v in evaluation.items() if k not in left_out}, Path(model)))


def test_a_few_lines_say_what_was_measured_and_what_was_not():
    lines = describe("best.pt")
    assert lines["where it lies"] == "63 % on a part (random cells 14 %)"
    assert "50 % of 60 answers change, without as many random cells 2 % (blur)" in lines["if removed"]
    assert lines["measured"] == (
        "accuracy 80.0 % on 243 test images of cub_mini cropped to boxes, 2026-11-22, opal-deploy 9"
    )
    # an export of it, of which the accuracy alone is known
    lines = describe("best.fp16.onnx", "pointing_game", "faithfulness", "boxes")
    assert list(lines) == ["where it lies", "if removed", "measured"]
    assert lines["if removed"].endswith("evaluate DATA --model best.fp16.onnx --faithfulness --record")
    assert "80.0 % with best.pt on 243 test images of cub_mini, 2026" in lines["measured"]
    assert list_evaluation({}, Path("my model.onnx"))[0][1].endswith("--model 'my model.onnx' --faithfulness --record")


CALIBRATION = {"method": "temperature", "images": 60, "temperature": 0.125, "ece": 0.02}


def test_an_onnx_file_keeps_its_graph_and_other_properties(exact_model, tmp_path):
    path = shutil.copy(exact_model, tmp_path / "m.onnx")
    model = onnx.load(path)
    model.metadata_props.add(key="of others", value="x" * 300)
    onnx.save(model, path)
    before = onnx_file.read_metadata(path)
    with pytest.raises(ArtifactError, match="do not match the digest"):  # the property was added behind our back
        record_measurements(path, {"evaluation": EVALUATION})
    digest = onnx_file.rewrite_metadata(path, before)
    message = record_measurements(path, {"evaluation": EVALUATION})
    after = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, after)
    assert replace(after, evaluation={}, file_sha256=before.file_sha256) == before
    assert after.evaluation == EVALUATION
    assert onnx.load(path).graph == model.graph
    assert {entry.key for entry in onnx.load(path).metadata_props} == {"opal", "of others"}
    assert digest[:16] in message
    assert after.file_sha256[:16] in message
    assert compute_sha256(path) in message
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]
    # a calibration stays when a later evaluation finds none
    record_measurements(path, {"evaluation": EVALUATION, "calibration": CALIBRATION})
    record_measurements(path, {"evaluation": EVALUATION})
    assert onnx_file.read_metadata(path).temperature == 0.125


def test_a_checkpoint_keeps_everything_else_and_its_metadata_carries_the_evaluation(exact_model, tmp_path):
    path, source = tmp_path / "m.pt", exact_model.with_suffix(".pt")
    checkpoint.save(path, checkpoint.load(source), extra={"optimizer": {"step": torch.arange(3)}})
    before = torch.load(path, weights_only=True)
    changes = {"evaluation": EVALUATION, "receptive_field": {"stride": 32, "effective": 60}}
    message = record_measurements(path, changes)
    assert compute_sha256(path) in message
    after = torch.load(path, weights_only=True)
    assert after.keys() == before.keys()
    assert torch.equal(after["optimizer"]["step"], torch.arange(3))
    metadata = checkpoint.build_metadata(checkpoint.load(path))
    assert metadata.evaluation == EVALUATION
    rows = list_evaluation(metadata.evaluation, path, metadata.receptive_field)
    assert ("what a cell sees", "60 pixels around its own 32") in rows


def test_an_engine_keeps_it_in_its_sidecar(exact_model, tmp_path):
    path = tmp_path / "m.engine"
    path.write_bytes(b"a plan")
    engine_file.write_sidecar(path, build_sidecar(path, onnx_file.read_metadata(exact_model)))
    message = record_measurements(path, {"evaluation": EVALUATION})
    assert engine_file.check_engine(path).metadata.evaluation == EVALUATION
    assert f"its sha256 is {compute_sha256(engine_file.sidecar_path(path))}; the engine is unchanged" in message


def test_models_that_cannot_keep_it_are_refused(exact_model):
    metadata, options = onnx_file.read_metadata(exact_model), EvaluateOptions(record=True)
    check_model(exact_model, metadata, options)
    with pytest.raises(UsageError, match="leave --record out"):
        check_model(exact_model, replace(metadata, evidence="map"), options)
    with pytest.raises(UsageError, match="--faithfulness"):
        check_model(exact_model, replace(metadata, evidence="none"), EvaluateOptions(faithfulness=True))
    with pytest.raises(UsageError, match="bare state dict"):
        check_model(Path("m.pt"), replace(metadata, source={"format": "authors"}), options)
