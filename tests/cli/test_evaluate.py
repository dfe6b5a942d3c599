"""`opal-deploy evaluate`: the same metrics from a checkpoint and from its export, and calls that are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from opal_deploy import evaluate_model, load
from opal_deploy.artifact.measurements import Calibration
from opal_deploy.artifact.onnx_file import read_metadata, rewrite_metadata
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.synthetic import generate_dataset

LABELS = ["0", "1", "2", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_pictures):
    """An ImageFolder whose folder names sort as the model's classes do, each with three images in every split."""
    root = tmp_path_factory.mktemp("evaluate")
    images = make_pictures(root / "images", 12)
    for split in ("train", "val", "test"):
        for label in range(4):
            target = root / "data" / split / f"{label}"
            target.mkdir(parents=True)
            for image in images[label::4]:
                shutil.copy(image, target)
    return root / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory, exact_model):
    """`exact_model`, its checkpoint beside it, with the folder's class names."""
    path = Path(shutil.copy(exact_model, tmp_path_factory.mktemp("model") / "model.onnx"))
    rewrite_metadata(path, replace(read_metadata(path), class_names=tuple(LABELS)))
    _rename(exact_model.with_suffix(".pt"), path.with_suffix(".pt"), LABELS)
    return path


@pytest.fixture(scope="module")
def linear(tmp_path_factory, linear_model):
    """A checkpoint of the linear head with the folder's class names."""
    return _rename(linear_model.with_suffix(".pt"), tmp_path_factory.mktemp("linear") / "linear.pt", LABELS)


def _rename(checkpoint, path, class_names):
    """Write a checkpoint again with other names of its classes."""
    checkpoints.save(path, replace(checkpoints.load(checkpoint), class_names=class_names))
    return path


@pytest.fixture
def lines():
    """The lines that `metrics` logged."""
    return []


@pytest.fixture
def metrics(lines):
    """Evaluate a model and return what `--json` prints."""

    def run(data, model, **options):
        return evaluate_model(model, data, **{"threads": 1, "batch": 5, "log": lines.append, **options}).to_dict()

    return run


def test_checkpoint_and_export_agree(folder, model, metrics, opal):
    printed = opal("evaluate", folder, "--model", model, "--threads", "1", "--json")
    reference, exported = metrics(folder, model.with_suffix(".pt")), json.loads(printed.stdout)
    assert exported["test_loss"] == pytest.approx(reference["test_loss"], abs=1e-6)
    for name in ("test_accuracy", "test_macro_f1", "spatial_prototype_collapse", "spatial_prototype_collapse_std"):
        assert exported[name] == reference[name]
    # only a checkpoint has gradients
    assert (reference["receptive_field"]["images"], exported["receptive_field"]["images"]) == (12, 0)
    assert reference["receptive_field"]["size"] == exported["receptive_field"]["size"] == 167
    # four classes, no parts
    assert not {"test_top5", "prototype_consistency", "part_purity", "unavailable"} & exported.keys()

    first = printed.stderr.splitlines()[0]
    assert first == f"read as imagefolder from {folder}: 4 classes, 12 training, 12 validation, 12 test images"


def test_the_function_takes_a_loaded_model_reports_progress_and_prints_nothing(folder, model, metrics, capsys):
    document = metrics(folder, model)
    notes, lines = [], []
    result = evaluate_model(
        load(model, device="cpu", threads=1), str(folder), batch=5, log=lines.append,
        progress=lambda done, total, note: notes.append((done, total)),
    )  # fmt: skip
    assert result.to_dict() == document
    assert (result.accuracy, result.metrics.images) == (document["test_accuracy"], 12)
    assert f"accuracy {result.accuracy:.2%}" in "\n".join(lines)
    assert notes[-1] == (12, 12)
    assert evaluate_model(model, folder, split="all", threads=1).metrics.images == 36
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UsageError, match="no such model"):
        evaluate_model(folder / "none.onnx", folder)


def test_images_that_cannot_be_decoded_are_all_named_and_the_others_measured(folder, model, opal, tmp_path):
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    damaged = sorted((data / "test").rglob("*.*"))[3:5]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-400])
    done = opal("evaluate", data, "--model", model, "--threads", "1", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["left_out"], document["test_images"]) == (3, 2, 10)
    assert "left out 2 image(s) that cannot be decoded" in done.stderr
    assert all(str(path.relative_to(data)) in done.stderr for path in damaged)


def test_the_validation_images_calibrate_and_the_calibration_is_measured_on_others(folder, model, metrics, tmp_path):
    path = tmp_path / "model.pt"
    shutil.copy(model.with_suffix(".pt"), path)
    document = metrics(folder, path, split="val", record=True)["calibration"]
    assert document["fitted"]["reason"] == "12 validation images, but at least 50 are needed"
    stored = checkpoints.load(path)
    assert stored.calibration == Calibration.from_dict(document["fitted"])
    # only such images calibrate
    assert "fitted" not in metrics(folder, path)["calibration"]

    checkpoints.save(path, replace(stored, calibration=Calibration(60, 0.01, ece=0.02)))
    document = metrics(folder, path, split="val", record=True)["calibration"]
    assert document.keys() == {"images", "accuracy", "uncalibrated", "calibrated"}
    assert (document["images"], document["calibrated"]["temperature"]) == (12, 0.01)
    assert checkpoints.load(path).calibration.temperature == 0.01
    records = load(path, threads=1).predict(sorted((folder / "val").rglob("*.*")))
    probabilities = [record["prediction"]["calibrated_probability"] for record in records]
    assert document["calibrated"]["mean_probability"] == pytest.approx(sum(probabilities) / 12, abs=1e-4)


def test_a_model_without_prototypes_has_no_collapse_and_its_crop_is_compared_with_the_data(
    folder, linear, metrics, lines, tmp_path
):
    path = tmp_path / "cropped.pt"
    checkpoints.save(path, replace(checkpoints.load(linear), crop="boxes"))
    assert "spatial_prototype_collapse" not in metrics(folder, path, dataset="imagefolder")
    assert "was trained on images cropped to boxes but is measured on whole images" in "\n".join(lines)
    with pytest.raises(UsageError, match="give --split all"):
        metrics(folder / "train", linear, dataset="imagefolder")
    assert metrics(folder / "train", linear, split="all", dataset="imagefolder")["all_images"] == 12


def test_other_classes_are_refused_before_the_model_runs(folder, linear, metrics, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "opal_deploy.evaluation.measure.evaluate_session", lambda *_, **options: pytest.fail(f"{options['model']} ran")
    )
    with pytest.raises(UsageError, match=r"knows 4 classes, .* has 4: number 3 is '3' in the model"):
        metrics(folder, _rename(linear, tmp_path / "other.pt", ["0", "1", "3", "2"]))


def test_logits_that_are_not_finite_are_refused(folder, linear, metrics, tmp_path):
    diverged = checkpoints.load(linear)
    for parameter in diverged.network.parameters():
        parameter.data[...] = float("nan")
    checkpoints.save(tmp_path / "diverged.pt", diverged)
    with pytest.raises(UsageError, match=r"\A.*diverged.pt: its logits for .*test/0/\d+.* are not finite.*\Z"):
        metrics(folder, tmp_path / "diverged.pt")


def test_the_generated_set_has_parts_and_foreground(metrics, lines, tmp_path, opal, exact_model):
    data = tmp_path / "data"
    classes = generate_dataset(data, num_species=4, train_per_class=1, val_per_class=1, test_per_class=3, size=(96, 96))
    path = _rename(exact_model.with_suffix(".pt"), tmp_path / "model.pt", classes)
    document = metrics(data, path, faithfulness=True, limit=2)

    assert "random cells of the creature" in document["faithfulness"]["random_control"]
    # random weights predict at least one of twelve correctly here
    assert document["pointing_game"]["images"] == round(12 * document["test_accuracy"]) > 0
    assert "on a distinguishing part" in "\n".join(lines)

    # the report and inspect say what was measured, once it is recorded in the model
    options = ("--explain", "--out", tmp_path / "explained", "--no-isolate")
    assert "pointing_game" not in metrics(data, path, parts=False, record=True)
    line = "not measured (no boxes, masks or parts)"
    assert opal("infer", data / "test/bimlu", "--model", path, *options).returncode == 0
    assert line in (tmp_path / "explained" / "report.html").read_text()
    assert line in opal("inspect", path).stdout
