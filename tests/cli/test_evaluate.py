"""`opal-deploy evaluate`: the same figures from a checkpoint and from what was exported of it."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opal_deploy import load
from opal_deploy.cli.evaluate import evaluate
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.model.config import HeadConfig

Figures = Callable[..., Any]
LABELS = ["0", "1", "2", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_pictures: Callable[[Path, int], list[Path]]) -> Path:
    """An ImageFolder whose folder names sort as the model's classes do, each with three images in every split."""
    root = tmp_path_factory.mktemp("evaluate")
    images = make_pictures(root / "drawn", 12)
    for split in ("train", "val", "test"):
        for label in range(4):
            target = root / "data" / split / f"{label}"
            target.mkdir(parents=True)
            for image in images[label::4]:
                shutil.copy(image, target)
    return root / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model, its checkpoint beside it, with the folder's class names."""
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.export.exporter import export
    from opal_deploy.export.options import ExportOptions, plan_targets
    from opal_deploy.model import checkpoint as checkpoints
    from opal_deploy.model.config import HeadConfig

    path = _saved(tmp_path_factory.mktemp("model") / "model.pt", HeadConfig(prototypes_per_class=3), LABELS)
    # comparing it with PyTorch is what the tests here do
    source = CheckpointSource(checkpoints.load(path), path)
    return export(source, plan_targets(source), ExportOptions(threads=1, verify=False)).onnx[0].path


def _saved(path: Path, head: HeadConfig, class_names: list[str]) -> Path:
    """A checkpoint of random weights."""
    import torch

    from opal_deploy.bench.targets.networks import update_batch_norms
    from opal_deploy.model.checkpoint import Checkpoint, save
    from opal_deploy.model.config import NetworkConfig
    from opal_deploy.model.network import OpalNetwork
    from opal_deploy.synthetic import example_images

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", len(class_names), (96, 96), head))
        update_batch_norms(network, example_images(8, 96, 96))
    save(path, Checkpoint(network, class_names))
    return path


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Figures:
    def run(data: Path, *models: Path, **options: object) -> Any:
        evaluate(data, list(models), **{"threads": 1, "batch": 5, "as_json": True, **options})  # type: ignore[arg-type]
        return json.loads(capsys.readouterr().out)

    return run


def test_checkpoint_and_export_agree(folder: Path, model: Path, figures: Figures) -> None:
    exported, checkpoint = figures(folder, model), figures(folder, model.with_suffix(".pt"))

    assert exported["test_accuracy"] == checkpoint["test_accuracy"]
    assert exported["test_macro_f1"] == checkpoint["test_macro_f1"]
    assert exported["test_loss"] == pytest.approx(checkpoint["test_loss"], abs=1e-6)
    assert exported["spatial_prototype_collapse"] == checkpoint["spatial_prototype_collapse"]
    assert exported["spatial_prototype_collapse_std"] == checkpoint["spatial_prototype_collapse_std"]
    # four classes, no parts
    assert not {"test_top5", "prototype_consistency", "part_purity", "unavailable"} & exported.keys()


def test_accuracy_counts_the_answers_that_explain_gives(folder: Path, model: Path, figures: Figures) -> None:
    found = figures(folder, model)

    paths = sorted((folder / "test").rglob("*.png"))
    records = load(model, threads=1).explain(paths)
    right = sum(r["prediction"]["label"] == p.parent.name for r, p in zip(records, paths, strict=True))
    assert found["test_images"] == len(paths) == 12
    assert found["test_accuracy"] == right / 12


def test_several_models_are_one_table_and_a_list(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = model.with_suffix(".pt")
    evaluate(folder, [checkpoint, model], threads=1, as_json=True)
    said = capsys.readouterr()

    assert [document["model"] for document in json.loads(said.out)] == [str(checkpoint), str(model)]
    header, *rows = said.err.splitlines()[-3:]
    # what no model has gets no column
    assert header.split() == ["model", "top-1", "macro", "F1", "loss", "collapse"]
    assert [row.split()[0] for row in rows] == [str(checkpoint), str(model)]
    assert rows[0].split()[1:] == rows[1].split()[1:]


def test_out_keeps_the_figures_the_matrix_and_every_answer(
    folder: Path, model: Path, figures: Figures, tmp_path: Path
) -> None:
    found = figures(folder, model, out=tmp_path / "out")

    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == found
    rows = _rows(tmp_path / "out" / "confusion.csv")
    assert [row.pop("truth") for row in rows] == LABELS
    assert {tuple(row) for row in rows} == {tuple(LABELS)}
    counts = [[int(cell) for cell in row.values()] for row in rows]
    assert [sum(row) for row in counts] == [3, 3, 3, 3]
    assert sum(counts[i][i] for i in range(4)) == round(12 * found["test_accuracy"])

    answers = _rows(tmp_path / "out" / "predictions.csv")
    record = load(model, threads=1).explain([folder / answers[0]["image"]])[0]
    assert answers[0]["predicted"] == record["prediction"]["label"]
    assert float(answers[0]["cosine"]) == pytest.approx(record["prediction"]["cosine"], abs=1e-6)
    assert float(answers[0]["margin"]) == pytest.approx(record["margin"], abs=1e-6)
    for answer in answers:
        assert answer["label"] == Path(answer["image"]).parent.name
        assert (answer["correct"] == "1") == (answer["predicted"] == answer["label"]) == (answer["rank"] == "1")
    for row, label in enumerate(LABELS):
        taken_for = [answer["predicted"] for answer in answers if answer["label"] == label]
        assert counts[row] == [taken_for.count(other) for other in LABELS]
    assert (tmp_path / "out" / "confusion.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(UsageError, match="already holds an evaluation"):
        figures(folder, model, out=tmp_path / "out")


def test_a_model_without_prototypes_has_neither_collapse_nor_cosines(
    folder: Path, figures: Figures, tmp_path: Path
) -> None:
    from opal_deploy.model.config import LINEAR_BASELINE

    found = figures(folder, _saved(tmp_path / "linear.pt", LINEAR_BASELINE, LABELS), out=tmp_path / "out")
    assert "spatial_prototype_collapse" not in found
    answers = _rows(tmp_path / "out" / "predictions.csv")
    assert {(answer["cosine"], answer["margin"]) for answer in answers} == {("", "")}


def test_a_named_data_set_is_read_as_such(folder: Path, model: Path, figures: Figures) -> None:
    assert figures(folder, model, dataset="imagefolder") == figures(folder, model)
    with pytest.raises(UsageError, match="no data set is called 'birds'"):
        figures(folder, model, dataset="birds")


def test_parts_that_are_not_there_are_refused(folder: Path, model: Path, figures: Figures) -> None:
    with pytest.raises(UsageError, match=r"no part locations .*; leave --parts out"):
        figures(folder, model, parts=True)


def test_a_missing_model_is_refused_before_the_others_run(folder: Path, model: Path, figures: Figures) -> None:
    with pytest.raises(UsageError, match=r"nothing.onnx: no such model"):
        figures(folder, model, Path("nothing.onnx"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["0", "1", "3", "2"],
            "4 classes each, but number 3 is '3' to the model and '2' in the data set; they must be",
        ),
        (["0", "1", "2"], r"knows 3 classes .0, ....,.* has 4 .* they must be the same, in the same order"),
    ],
    ids=["another order", "another number"],
)
def test_other_classes_are_refused_before_any_model_runs(
    folder: Path, model: Path, figures: Figures, tmp_path: Path, names: list[str], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from opal_deploy.evaluation import session
    from opal_deploy.model.config import LINEAR_BASELINE

    monkeypatch.setattr(session, "evaluate_session", lambda *_, **options: pytest.fail(f"{options['model']} ran"))
    other = _saved(tmp_path / "other.pt", LINEAR_BASELINE, names)
    with pytest.raises(UsageError, match=message):
        figures(folder, model, other, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_out_in_the_data_set_is_refused_and_not_made(folder: Path, model: Path, figures: Figures) -> None:
    with pytest.raises(UsageError, match="would become part of the data set"):
        figures(folder, model, out=folder / "train" / "figures")
    assert not (folder / "train" / "figures").exists()


def test_what_the_folder_was_read_as_is_said(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(folder, [model], threads=1)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        f"read as imagefolder from {folder}: 4 classes, 12 images to train on, 12 to validate, 12 to test"
    )
    assert not any("boxes" in line for line in said)


def test_reading_shows_how_far_it_is(
    folder: Path, model: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.cli import console

    shown: dict[str, list[tuple[int, int | None]]] = {"reading": [], "evaluating": []}

    @contextmanager
    def progress(title: str) -> Iterator[console.Advance]:
        yield lambda done, total=None, note="": shown[title].append((done, total))

    monkeypatch.setitem(evaluate.__globals__, "progress", progress)
    figures(folder, model)
    assert shown["reading"][-1] == (36, 36)
    assert shown["evaluating"][-1] == (12, 12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_no_figures(
    folder: Path, figures: Figures, tmp_path: Path, value: float
) -> None:
    from opal_deploy.model import checkpoint as checkpoints
    from opal_deploy.model.config import LINEAR_BASELINE

    path = _saved(tmp_path / "diverged.pt", LINEAR_BASELINE, LABELS)
    diverged = checkpoints.load(path)
    for parameter in diverged.network.parameters():
        parameter.data[...] = value
    checkpoints.save(path, diverged)
    with pytest.raises(
        UsageError, match=r"diverged.pt: its logits for .*test/0/\d+.* are not finite numbers"
    ) as caught:
        figures(folder, path, out=tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("trained", "cropped", "boxes", "warning"),
    [
        (None, None, True, None),
        ("boxes", "boxes", True, None),
        (None, "boxes", False, None),
        ("boxes", None, True, "cropped to their boxes and is measured on whole ones; the data set has no boxes"),
        ("boxes", "boxes", False, "cropped to their boxes and is measured on whole ones; see --boxes"),
        (None, "boxes", True, "whole images and is measured on images cropped to their boxes; see --no-boxes"),
    ],
)
def test_another_crop_than_in_training_is_a_warning(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    trained: str | None, cropped: Any, boxes: bool, warning: str | None,
) -> None:  # fmt: skip
    from opal_deploy.datasets import registry
    from opal_deploy.model import checkpoint as checkpoints

    path = tmp_path / "model.pt"
    checkpoints.save(path, replace(checkpoints.load(model.with_suffix(".pt")), crop=trained))
    read = registry.read_dataset
    monkeypatch.setattr(
        registry, "read_dataset", lambda *args, **options: replace(read(*args, **options), crop=cropped)
    )
    evaluate(folder, [path], threads=1, boxes=boxes)
    warnings = [line for line in capsys.readouterr().err.splitlines() if f"warning: {path} says it was" in line]
    assert [line.endswith(warning or "") for line in warnings] == [True] * (warning is not None)


def test_names_that_are_not_utf8_are_written_as_infer_writes_them(
    folder: Path, figures: Figures, tmp_path: Path
) -> None:
    from opal_deploy.model.config import LINEAR_BASELINE

    names = ["0", "1", "2", "cl\udcff"]
    root = shutil.copytree(folder, tmp_path / "data")
    for split in ("train", "val", "test"):
        (root / split / "3").rename(root / split / names[3])
    figures(root, _saved(tmp_path / "odd.pt", LINEAR_BASELINE, names), out=tmp_path / "out")

    answers = _rows(tmp_path / "out" / "predictions.csv")
    assert [a["image"].split("/")[1] for a in answers if a["label"] not in LABELS] == [r"cl\xff"] * 3
    assert [row["truth"] for row in _rows(tmp_path / "out" / "confusion.csv")] == ["0", "1", "2", r"cl\xff"]
    assert (tmp_path / "out" / "confusion.png").is_file()


def test_faithfulness_of_a_checkpoint_and_of_its_export_agree(
    folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [model.with_suffix(".pt"), model]
    evaluate(
        folder, models, threads=1, faithfulness=True, limit=4, fill=["mean"], out=tmp_path / "out", as_json=True
    )  # fmt: skip
    said = capsys.readouterr()
    checkpoint, exported = json.loads(said.out)

    assert checkpoint["faithfulness"]["images"] == exported["faithfulness"]["images"] == 4
    names = ["contribution", "reverse", "random", "runner-up", "another class"]
    by_order = [{row["order"]: row for row in found["faithfulness"]["removal"]} for found in (checkpoint, exported)]
    assert set(names) <= by_order[1].keys()
    # Grad-CAM needs gradients
    assert by_order[0].keys() - by_order[1].keys() == {"grad-cam"}
    assert exported["faithfulness"]["unavailable"]["grad-cam"].startswith("an exported model has no gradients")
    for name in names:
        for curve in ("deletion", "insertion"):
            assert by_order[0][name][curve] == pytest.approx(by_order[1][name][curve], abs=1e-5)
    assert [change["same_cell"] for change in checkpoint["faithfulness"]["stability"]] == [
        change["same_cell"] for change in exported["faithfulness"]["stability"]
    ]
    assert checkpoint["agreement"] == []
    (found,) = exported["agreement"]
    assert (found["with"], found["same_class"], found["same_cells"]) == (str(models[0]), 1.0, 1.0)
    assert found["largest_cosine_difference"] < 1e-5

    assert "faithfulness: 4 images, at most" in said.err
    assert "random cells of the whole image (no foreground is known)" in said.err
    assert "agree on 100.00% of 12 answers and 100.00% of its cells" in said.err
    kept = json.loads((tmp_path / "out" / "model.onnx" / "faithfulness.json").read_text())
    assert kept == exported["faithfulness"]
    assert (tmp_path / "out" / "model.pt" / "faithfulness.png").read_bytes().startswith(b"\x89PNG")


def test_faithfulness_of_a_model_without_single_cells_is_refused_before_the_data_is_read(
    figures: Figures, tmp_path: Path
) -> None:
    from opal_deploy.model.config import LINEAR_BASELINE

    with pytest.raises(UsageError, match=r"has no prototypes \(evidence none\); --faithfulness needs"):
        figures(tmp_path / "no data", _saved(tmp_path / "linear.pt", LINEAR_BASELINE, LABELS), faithfulness=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fill": ["grey"]}, "--fill 'grey': expected blur, mean, noise"),
        ({"target_error": "often"}, "--target-error 'often': expected a percentage"),
        ({"target_error": "5%"}, "12 labelled images cannot show .* even without a wrong answer 59 are needed"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_model_runs(
    folder: Path, model: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    from opal_deploy.evaluation import session

    monkeypatch.setattr(session, "evaluate_session", lambda *_, **options: pytest.fail(f"{options['model']} ran"))
    with pytest.raises(UsageError, match=message):
        figures(folder, model, **options)


def test_risk_and_coverage_are_those_of_the_answers_that_are_kept(
    folder: Path, model: Path, figures: Figures, tmp_path: Path
) -> None:
    found = figures(folder, model, out=tmp_path / "out", target_error="80%")

    answers = sorted(_rows(tmp_path / "out" / "predictions.csv"), key=lambda row: -float(row["margin"]))
    wrong = 0
    rows = _rows(tmp_path / "out" / "risk_coverage.csv")
    at = {int(row["answered"]): row for row in rows}
    for number, answer in enumerate(answers, start=1):
        wrong += answer["correct"] == "0"
        if number in at:
            assert (int(at[number]["wrong"]), float(at[number]["min_margin"])) == (wrong, float(answer["margin"]))
    assert int(rows[-1]["answered"]) == found["test_risk"]["images"] == 12
    assert found["test_risk"]["error"] == pytest.approx(1 - found["test_accuracy"])
    assert (tmp_path / "out" / "risk_coverage.png").read_bytes().startswith(b"\x89PNG")
    # random weights: whether something supports even this depends on them, but the document says which
    threshold = found["threshold"]
    assert (threshold["min_margin"] is None) == ("reason" in threshold)
    assert threshold["target_error"] == 0.8


def test_the_generated_set_brings_its_parts_and_its_foreground(
    figures: Figures, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from opal_deploy.model.config import HeadConfig
    from opal_deploy.synthetic import generate_dataset

    made = generate_dataset(
        tmp_path / "data", num_species=4, train_per_class=1, val_per_class=1, test_per_class=3, size=(96, 96)
    )
    path = _saved(tmp_path / "model.pt", HeadConfig(prototypes_per_class=2), list(made.classes))
    evaluate(
        made.root, [path], threads=1, faithfulness=True, limit=2, fill=["mean"], out=tmp_path / "out", as_json=True
    )  # fmt: skip
    said = capsys.readouterr()
    found = json.loads(said.out)

    assert "random cells of the creature" in found["faithfulness"]["random_control"]
    # random weights answer at least one of twelve rightly here
    assert found["generated_parts"]["images"] == round(12 * found["test_accuracy"]) > 0
    assert "boxes on a distinguishing part" in said.err
    rows = _rows(tmp_path / "out" / "slot_parts.csv")
    assert {row["slot"] for row in rows} == {"0", "1"}

    assert "generated_parts" not in figures(made.root, path, parts=False)
