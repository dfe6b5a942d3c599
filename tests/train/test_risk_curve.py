"""Training keeps the validation images' risk-coverage curve; the metadata carries it on, and `inspect` shows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.inspect import inspect
from opal_deploy.datasets.samples import DataSet
from opal_deploy.model import checkpoint
from opal_deploy.model.config import HeadConfig
from opal_deploy.statistics.risk import choose_threshold
from opal_deploy.train.images import Batches, TrainImages
from opal_deploy.train.loop import fit
from opal_deploy.train.recipe import TrainOptions
from opal_deploy.train.validation import evaluate


def test_the_curve_is_kept_from_training_to_inspect(
    squares: DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TrainOptions(
        "shufflenet_v2_x0_5", HeadConfig(2), epochs=1, batch_size=6, input_size=(64, 64), device="cpu"
    )
    best = fit(squares, options, tmp_path / "run").best
    stored = checkpoint.load(best)
    metadata = checkpoint.build_metadata(stored)

    assert metadata.risk["split"] == "val"
    assert metadata.risk["images"] == 6
    assert metadata.risk["error"] == pytest.approx(1 - stored.metrics["val_accuracy"])
    again = evaluate(stored.network, Batches(TrainImages(squares.val, (64, 64)), 64)).risk
    assert again is not None
    assert {**metadata.risk, "levels": None} == {"split": "val", **again, "levels": None}
    assert np.array(metadata.risk["levels"]) == pytest.approx(np.array(again["levels"]), abs=1e-5)
    # every metric in the training record is a single number
    assert not [value for value in metadata.training["metrics"].values() if isinstance(value, dict)]
    # through the file, and from there a threshold can be chosen, or refused
    read_back = Metadata.from_json(metadata.to_json())
    assert read_back.risk == metadata.risk
    assert "6 labelled images cannot show" in choose_threshold(read_back.risk, 0.05).reason

    inspect(best)
    said = capsys.readouterr().err
    line = next(line for line in said.splitlines() if line.startswith("risk"))
    assert "6 val images: error" in line
    assert "levels" not in said
