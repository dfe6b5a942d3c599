"""Training keeps the validation images' risk-coverage curve; the metadata carries it on, and `inspect` shows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.inspect import inspect
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.model import checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.statistics.risk import choose_threshold
from opal_deploy.train.images import Batches, TrainImages
from opal_deploy.train.loop import fit
from opal_deploy.train.recipe import TrainOptions
from opal_deploy.train.validation import evaluate


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("colours"), np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 3), ("test", 2)):
        for label, name in enumerate(("blue", "green", "red")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 120, (40, 40, 3), dtype=np.uint8)
                pixels[..., 2 - label] += 120
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


def _best(data: Path, out: Path, head: HeadConfig) -> Path:
    options = TrainOptions(
        backbone="shufflenet_v2_x0_5", epochs=1, batch_size=6, input_size=(64, 64), head=head, device="cpu"
    )
    return fit(read_dataset(data), options, out).best


def test_the_curve_is_kept_from_training_to_inspect(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = _best(data, tmp_path / "run", HeadConfig(prototypes_per_class=2))
    stored = checkpoint.load(best)
    metadata = checkpoint.build_metadata(stored)

    assert metadata.risk["split"] == "val"
    assert metadata.risk["images"] == 9
    assert metadata.risk["error"] == pytest.approx(1 - stored.metrics["val_accuracy"])
    again = evaluate(stored.network, Batches(TrainImages(read_dataset(data).val, (64, 64)), 64)).risk
    assert again is not None
    assert {**metadata.risk, "levels": None} == {"split": "val", **again, "levels": None}
    assert np.array(metadata.risk["levels"]) == pytest.approx(np.array(again["levels"]), abs=1e-5)
    # what the figures of training say is one number each
    assert not [value for value in metadata.training["metrics"].values() if isinstance(value, dict)]
    # through the file, and from there a threshold can be chosen, or refused
    read_back = Metadata.from_json(metadata.to_json())
    assert read_back.risk == metadata.risk
    assert "9 labelled images cannot show" in choose_threshold(read_back.risk, 0.05).reason

    inspect(best)
    said = capsys.readouterr().err
    line = next(line for line in said.splitlines() if line.startswith("risk"))
    assert "9 val images: error" in line
    assert "levels" not in said


def test_a_network_without_anchors_has_no_margins_and_no_curve(data: Path, tmp_path: Path) -> None:
    best = _best(data, tmp_path / "run", LINEAR_BASELINE)

    assert checkpoint.build_metadata(checkpoint.load(best)).risk == {}
