"""`opal-deploy evaluate`: the same metrics from a checkpoint and from its export, and calls that are refused."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from opal_deploy import evaluate_model, evaluate_models, load
from opal_deploy.errors import UsageError

LABELS = ["0", "1", "2", "3"]
PNG = b"\x89PNG"


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
    import onnx

    from opal_deploy.artifact.metadata import BLANK_DIGEST
    from opal_deploy.artifact.onnx_file import embed_digest, read_metadata, write_model
    from opal_deploy.model import checkpoint as checkpoints

    path = tmp_path_factory.mktemp("model") / "model.onnx"
    metadata = replace(read_metadata(exact_model), class_names=tuple(LABELS), file_sha256=BLANK_DIGEST)
    write_model(onnx.load(str(exact_model)), metadata, path)
    embed_digest(path)
    checkpoint = checkpoints.load(exact_model.with_suffix(".pt"))
    checkpoints.save(path.with_suffix(".pt"), replace(checkpoint, class_names=LABELS))
    return path


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """A checkpoint of the linear head with the folder's class names."""
    return _save(tmp_path_factory.mktemp("linear") / "linear.pt", LABELS)


def _save(path, class_names, prototypes=None):
    """Write a checkpoint of random weights, of the linear head unless it has prototypes."""
    import torch

    from opal_deploy.bench.networks import update_batch_norms
    from opal_deploy.model.checkpoint import Checkpoint, save
    from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig
    from opal_deploy.model.network import OpalNetwork
    from opal_deploy.synthetic import example_images

    head = LINEAR_BASELINE if prototypes is None else HeadConfig(prototypes_per_class=prototypes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", len(class_names), (96, 96), head))
        update_batch_norms(network, example_images(8, 96, 96))
    save(path, Checkpoint(network, class_names))
    return path


def _rows(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture
def lines():
    """The lines that `metrics` logged."""
    return []


@pytest.fixture
def metrics(lines):
    """Evaluate models and return what `--json` prints."""

    def run(data, *models, **options):
        results = evaluate_models(models, data, **{"threads": 1, "batch": 5, "log": lines.append, **options})
        documents = [result.to_dict() for result in results]
        return documents[0] if len(documents) == 1 else documents

    return run


def test_checkpoint_and_export_agree_in_one_table_and_a_list(folder, model, opal):
    checkpoint = model.with_suffix(".pt")
    printed = opal("evaluate", folder, "--model", checkpoint, "--model", model, "--threads", "1", "--json")

    reference, exported = json.loads(printed.stdout)
    assert [reference["model"], exported["model"]] == [str(checkpoint), str(model)]
    assert exported["test_loss"] == pytest.approx(reference["test_loss"], abs=1e-6)
    for name in ("test_accuracy", "test_macro_f1", "spatial_prototype_collapse", "spatial_prototype_collapse_std"):
        assert exported[name] == reference[name]
    # only a checkpoint has gradients
    assert (reference["receptive_field"]["images"], exported["receptive_field"]["images"]) == (12, 0)
    assert reference["receptive_field"]["size"] == exported["receptive_field"]["size"] == 527
    # four classes, no parts
    assert not {"test_top5", "prototype_consistency", "part_purity", "unavailable"} & exported.keys()

    first = printed.stderr.splitlines()[0]
    assert first == f"read as imagefolder from {folder}: 4 classes, 12 training, 12 validation, 12 test images"
    header, *rows = printed.stderr.splitlines()[-3:]
    # a metric that no model has gets no column
    assert header.split() == ["model", "top-1", "macro", "F1", "loss", "collapse"]
    assert [row.split()[0] for row in rows] == [str(checkpoint), str(model)]
    assert rows[0].split()[1:] == rows[1].split()[1:]


def test_the_function_takes_a_loaded_model_reports_progress_and_prints_nothing(folder, model, metrics, capsys):
    document = metrics(folder, model)
    notes = []
    lines = []
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


def test_the_validation_images_calibrate_and_the_calibration_is_measured_on_others(folder, model, metrics, tmp_path):
    from opal_deploy.artifact.measurements import Calibration
    from opal_deploy.model import checkpoint as checkpoints

    path = tmp_path / "model.pt"
    shutil.copy(model.with_suffix(".pt"), path)
    document = metrics(folder, path, split="val", record=True)["calibration"]
    assert document["fitted"]["reason"] == "12 validation images, but at least 50 are needed"
    stored = checkpoints.load(path)
    assert stored.calibration == Calibration.from_dict(document["fitted"])
    # only such images calibrate
    assert "fitted" not in metrics(folder, path)["calibration"]

    checkpoints.save(path, replace(stored, calibration=Calibration(60, 0.01, ece=0.02)))
    document = metrics(folder, path, split="val", record=True, out=tmp_path / "out")["calibration"]
    assert document.keys() == {"images", "accuracy", "uncalibrated", "calibrated"}
    assert (document["images"], document["calibrated"]["temperature"]) == (12, 0.01)
    calibration = checkpoints.load(path).calibration
    assert calibration.temperature == 0.01
    rows = _rows(tmp_path / "out" / "predictions.csv")
    written = [float(row["calibrated_probability"]) for row in rows]
    records = load(path, threads=1).predict([folder / row["image"] for row in rows])
    assert written == pytest.approx([record["prediction"]["calibrated_probability"] for record in records], abs=1e-4)
    assert document["calibrated"]["mean_probability"] == pytest.approx(sum(written) / 12)


def test_out_has_the_metrics_the_matrix_the_predictions_and_the_risk(folder, model, metrics, tmp_path):
    out = tmp_path / "out"
    document = metrics(folder, model, out=out, target_error=0.8)

    assert json.loads((out / "evaluation.json").read_text()) == document
    rows = _rows(out / "confusion.csv")
    assert [row.pop("label") for row in rows] == LABELS
    assert {tuple(row) for row in rows} == {tuple(LABELS)}
    counts = [[int(cell) for cell in row.values()] for row in rows]
    assert [sum(row) for row in counts] == [3, 3, 3, 3]
    assert sum(counts[i][i] for i in range(4)) == round(12 * document["test_accuracy"])

    predictions = _rows(out / "predictions.csv")
    records = load(model, threads=1).predict([folder / row["image"] for row in predictions])
    assert len(predictions) == document["test_images"] == 12
    for row, record in zip(predictions, records, strict=True):
        assert row["predicted"] == record["prediction"]["label"]
        assert float(row["cosine"]) == pytest.approx(record["prediction"]["cosine"], abs=1e-6)
        assert float(row["margin"]) == pytest.approx(record["margin"], abs=1e-6)
        assert row["label"] == Path(row["image"]).parent.name
        assert (row["correct"] == "1") == (row["predicted"] == row["label"]) == (row["rank"] == "1")
    for number, label in enumerate(LABELS):
        taken_for = [row["predicted"] for row in predictions if row["label"] == label]
        assert counts[number] == [taken_for.count(other) for other in LABELS]

    rows = _rows(out / "risk_coverage.csv")
    ranked = sorted(predictions, key=lambda row: -float(row["margin"]))
    for row in rows:
        answered = ranked[: int(row["answered"])]
        assert int(row["wrong"]) == sum(each["correct"] == "0" for each in answered)
        assert not answered or float(row["min_margin"]) == float(answered[-1]["margin"])
    assert int(rows[-1]["answered"]) == document["test_risk"]["images"] == 12
    assert document["test_risk"]["error"] == pytest.approx(1 - document["test_accuracy"])
    # random weights: whether anything supports even this depends on them, but the document has a reason where not
    threshold = document["threshold"]
    assert (threshold["min_margin"] is None) == ("reason" in threshold)
    assert threshold["target_error"] == 0.8
    for name in ("confusion.png", "risk_coverage.png"):
        assert (out / name).read_bytes().startswith(PNG)

    with pytest.raises(UsageError, match="already holds an evaluation"):
        metrics(folder, model, out=out)


def test_a_model_without_prototypes_has_neither_collapse_nor_cosines_and_its_crop_is_compared_with_the_data(
    folder, linear, metrics, lines, tmp_path
):
    from opal_deploy.model import checkpoint as checkpoints

    path = tmp_path / "cropped.pt"
    checkpoints.save(path, replace(checkpoints.load(linear), crop="boxes"))
    document = metrics(folder, path, out=tmp_path / "out", dataset="imagefolder")
    assert f"warning: {path} was trained on images cropped to boxes" in "\n".join(lines)
    assert "spatial_prototype_collapse" not in document
    predictions = _rows(tmp_path / "out" / "predictions.csv")
    assert {(row["cosine"], row["margin"]) for row in predictions} == {("", "")}


def test_a_folder_without_splits_is_measured_whole_if_asked_for(folder, linear, metrics, lines, tmp_path):
    from opal_deploy.model import checkpoint as checkpoints

    whole = folder / "train"
    with pytest.raises(UsageError, match=r"no test images; give --split all for all 12 if none was used in training"):
        metrics(whole, linear, dataset="imagefolder")
    trained = replace(checkpoints.load(linear), training={"data": {"root": str(folder)}})
    checkpoints.save(tmp_path / "trained.pt", trained)
    (tmp_path / "paths.json").write_text(json.dumps({"data": str(folder)}))
    document = metrics(whole, tmp_path / "trained.pt", split="all", dataset="imagefolder")
    assert document["all_images"] == sum(1 for path in whole.rglob("*") if path.is_file())
    assert f"was trained on images in {folder}, perhaps on these" in "\n".join(lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "birds"}, "unknown data set 'birds'"),
        ({"parts": True}, r"no part locations .*; leave --parts out"),
        ({"out": "data/train/metrics"}, "would become part of the data set"),
        ({"fill": ["mean"]}, "--fill: only for --faithfulness; add one"),
        ({"target_error": 0.05}, "12 labelled images cannot show .* even without errors, 59 are needed"),
        (
            {"second": ["0", "1", "3", "2"]},
            "4 classes each, but number 3 is '3' in the model and '2' in the data set; they must be",
        ),
    ],
)
def test_a_wrong_call_is_refused_before_any_model_runs(folder, model, metrics, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(
        "opal_deploy.evaluation.measure.evaluate_session", lambda *_, **options: pytest.fail(f"{options['model']} ran")
    )
    out = folder.parent / options["out"] if "out" in options else tmp_path / "out"
    second = options.get("second")
    if isinstance(second, list):
        second = _save(tmp_path / "other.pt", second)
    given = {name: value for name, value in options.items() if name not in ("second", "out")}
    with pytest.raises(UsageError, match=message):
        metrics(folder, model, *([] if second is None else [Path(second)]), out=out, **given)
    assert not out.exists()


def test_logits_that_are_not_finite_are_refused(folder, linear, metrics, tmp_path):
    from opal_deploy.model import checkpoint as checkpoints

    diverged = checkpoints.load(linear)
    for parameter in diverged.network.parameters():
        parameter.data[...] = float("nan")
    checkpoints.save(tmp_path / "diverged.pt", diverged)
    with pytest.raises(UsageError, match=r"diverged.pt: its logits for .*test/0/\d+.* are not finite") as caught:
        metrics(folder, tmp_path / "diverged.pt", out=tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_faithfulness_of_a_checkpoint_and_of_its_export_agree(folder, model, metrics, lines, tmp_path):
    models, out = [model.with_suffix(".pt"), model], tmp_path / "out"
    checkpoint, exported = metrics(folder, *models, faithfulness=True, limit=4, fill=["mean"], out=out)

    assert checkpoint["faithfulness"]["images"] == exported["faithfulness"]["images"] == 4
    names = ["contribution", "reverse", "random", "runner-up", "another class"]
    rankings = [{row["ranking"]: row for row in each["faithfulness"]["rankings"]} for each in (checkpoint, exported)]
    assert set(names) <= rankings[1].keys()
    # Grad-CAM needs gradients
    assert rankings[0].keys() - rankings[1].keys() == {"grad-cam"}
    assert exported["faithfulness"]["unavailable"]["grad-cam"].startswith("an exported model has no gradients")
    for name in names:
        for curve in ("deletion", "insertion"):
            assert rankings[0][name][curve] == pytest.approx(rankings[1][name][curve], abs=1e-5)
    assert [change["same_cell"] for change in checkpoint["faithfulness"]["stability"]] == [
        change["same_cell"] for change in exported["faithfulness"]["stability"]
    ]
    assert checkpoint["agreement"] == []
    (agreement,) = exported["agreement"]
    assert (agreement["with"], agreement["same_class"], agreement["same_cells"]) == (str(models[0]), 1.0, 1.0)
    assert agreement["largest_cosine_difference"] < 1e-5

    text = "\n".join(lines)
    assert "faithfulness: 4 images, at most" in text
    assert "random cells of the whole image (no foreground is known)" in text
    assert "100.00% same class, 100.00% same cells" in text
    written = json.loads((out / "model.onnx" / "faithfulness.json").read_text())
    assert written == exported["faithfulness"]
    assert (out / "model.pt" / "faithfulness.png").read_bytes().startswith(PNG)


def test_the_generated_set_has_parts_and_foreground(metrics, lines, tmp_path, opal):
    from opal_deploy.synthetic import generate_dataset

    data = generate_dataset(
        tmp_path / "data", num_species=4, train_per_class=1, val_per_class=1, test_per_class=3, size=(96, 96)
    )
    path, out = _save(tmp_path / "model.pt", list(data.classes), 2), tmp_path / "out"
    document = metrics(data.root, path, faithfulness=True, limit=2, fill=["mean"], out=out)

    assert "random cells of the creature" in document["faithfulness"]["random_control"]
    # random weights predict at least one of twelve correctly here
    assert document["pointing_game"]["images"] == round(12 * document["test_accuracy"]) > 0
    assert "on a distinguishing part" in "\n".join(lines)
    assert {row["slot"] for row in _rows(out / "slot_parts.csv")} == {"0", "1"}

    # infer says what was measured, once it is recorded in the model
    explain = ("infer", data.root / "test" / "bimlu", "--model", path, "--explain", "--out", tmp_path / "explained")
    assert (
        "measured:         not yet, so it is unknown whether the boxes show what drives the prediction"
        in opal(*explain).stderr
    )
    assert "pointing_game" not in metrics(data.root, path, parts=False, record=True)
    line = "not measured (no boxes, masks or parts)"
    assert f"where it lies:    {line}" in opal(*explain, "--overwrite").stderr
    assert line in (tmp_path / "explained" / "report.html").read_text()
    assert line in opal("inspect", path).stderr
