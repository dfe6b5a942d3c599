"""`opal-deploy train`: from options to a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opal_deploy.cli.options import parse_size
from opal_deploy.cli.train import train
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint
from opal_deploy.train.setup import default_weights


@pytest.mark.parametrize(("text", "expected"), [("224", (224, 224)), ("224x448", (224, 448)), ("32X64", (32, 64))])
def test_a_size_is_one_number_or_height_x_width(text: str, expected: tuple[int, int]) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "224x", "0", "-224", "1x2x3", "big", "224.0"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number of pixels"):
        parse_size(text)


@pytest.mark.parametrize(
    ("backbone", "weights"),
    [("resnet50", "IMAGENET1K_V2"), ("resnet18", "IMAGENET1K_V1"), ("convnext_tiny", "IMAGENET1K_V1")],
)
def test_default_weights_are_the_papers(backbone: str, weights: str) -> None:
    assert default_weights(backbone) == weights


def test_the_command_trains_and_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(5):
            pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{index}.png")
    (tmp_path / "data" / "a" / "bad.jpg").touch()
    out = tmp_path / "run"
    train(tmp_path / "data", backbone="shufflenet_v2_x0_5", weights="none", epochs=1, size="64", out=out)
    said = capsys.readouterr().err
    assert "warning: 1 of 11 files cannot be used, left out: a/bad.jpg (zero bytes)" in said
    assert f"read as imagefolder from {tmp_path / 'data'}: 2 classes, 8 images to train on, 2 to validate" in said
    assert "the data set has no test images" in said
    assert said.endswith(f"next: opal-deploy export {out / 'best.pt'}\n")
    assert checkpoint.load(out / "best.pt").class_names == ["a", "b"]


def test_a_runs_own_recipe_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(5):
            Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(
                tmp_path / "data" / name / f"{index}.png"
            )
    first, second = tmp_path / "first", tmp_path / "second"
    train(tmp_path / "data", backbone="shufflenet_v2_x0_5", weights="none", epochs=1, size="64", seed=3,
          prototypes=2, no_cws=True, out=first)  # fmt: skip
    train(tmp_path / "data", recipe=str(first / "recipe.toml"), out=second)
    assert (second / "recipe.toml").read_bytes() == (first / "recipe.toml").read_bytes()
    weights = [checkpoint.load(out / "best.pt").network.state_dict() for out in (first, second)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert checkpoint.load(second / "best.pt").network.config.head.cws is False


def test_tensorboard_logs_each_epoch(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(5):
            Image.new("RGB", (40, 40), (index * 20, 0, 0)).save(tmp_path / "data" / name / f"{index}.png")
    train(tmp_path / "data", backbone="shufflenet_v2_x0_5", weights="none", epochs=2, size="64",
          tensorboard=True, out=tmp_path / "run")  # fmt: skip
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("val_loss")] == [1, 2]
    assert {"train_loss", "val_accuracy", "images_per_second", "data_wait"} <= set(events.Tags()["scalars"])
