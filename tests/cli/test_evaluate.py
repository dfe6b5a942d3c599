"""`opal-deploy evaluate`: the same figures from a checkpoint and from what was exported of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from opal_deploy import load
from opal_deploy.cli.evaluate import evaluate
from opal_deploy.errors import UsageError

Figures = Callable[..., dict[str, float]]


@pytest.fixture
def folder(tmp_path: Path, exact_model: Path, make_pictures: Callable[[Path, int], list[Path]]) -> Path:
    """An ImageFolder whose folder names sort as the model's classes do, each with three pictures in every split."""
    pictures = make_pictures(tmp_path / "drawn", 12)
    for split in ("train", "val", "test"):
        for label in range(4):
            target = tmp_path / "data" / split / f"{label}"
            target.mkdir(parents=True)
            for picture in pictures[label::4]:
                shutil.copy(picture, target)
    return tmp_path / "data"


@pytest.fixture
def model(tmp_path: Path, exact_model: Path) -> Path:
    """The exported model, its checkpoint beside it, with the folder's class names."""
    from opal_deploy.export.candidate import ExportOptions
    from opal_deploy.export.checkpoint_export import export_checkpoint
    from opal_deploy.model import checkpoint as checkpoints

    renamed = tmp_path / "renamed.pt"
    loaded = checkpoints.load(exact_model.with_suffix(".pt"), class_names=["0", "1", "2", "3"])
    checkpoints.save(renamed, loaded)
    return export_checkpoint(checkpoints.load(renamed), renamed, ExportOptions(threads=1)).path


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Figures:
    def run(data: Path, model: Path, **options: object) -> dict[str, float]:
        evaluate(data, model, **{"split": "test", "boxes": True, "threads": 1, "batch": 5, "as_json": True, **options})  # type: ignore[arg-type]
        return json.loads(capsys.readouterr().out)

    return run


def test_checkpoint_and_export_agree(folder: Path, model: Path, figures: Figures) -> None:
    exported, checkpoint = figures(folder, model), figures(folder, model.with_suffix(".pt"))

    assert exported["test_accuracy"] == checkpoint["test_accuracy"]
    assert exported["test_loss"] == pytest.approx(checkpoint["test_loss"], abs=1e-6)
    assert exported["spatial_prototype_collapse"] == checkpoint["spatial_prototype_collapse"]


def test_accuracy_counts_the_answers_that_explain_gives(folder: Path, model: Path, figures: Figures) -> None:
    found = figures(folder, model)

    paths = sorted((folder / "test").rglob("*.png"))
    records = load(model, threads=1).explain(paths)
    right = sum(r["prediction"]["label"] == p.parent.name for r, p in zip(records, paths, strict=True))
    assert found["test_images"] == len(paths) == 12
    assert found["test_accuracy"] == right / 12


def test_other_classes_are_refused(folder: Path, exact_model: Path, figures: Figures) -> None:
    with pytest.raises(UsageError, match="they must be the same, in the same order"):
        figures(folder, exact_model)
