"""`opal-deploy train`: from options to a run."""

import shutil
from unittest.mock import Mock

import pytest
import torch

from opal_deploy.errors import ExitCode, UsageError
from opal_deploy.model import checkpoint
from opal_deploy.options import parse_size
from opal_deploy.train.machine import default_num_workers
from tests.builders import SMALL_BACKBONE

SMALL = ("--recipe", "paper", "--backbone", SMALL_BACKBONE, "--weights", "none", "--size", "64")


def test_size_is_one_number_or_height_x_width():
    assert [parse_size(text) for text in ("224", "224x448", "32X64")] == [(224, 224), (224, 448), (32, 64)]
    for text in ("", "x", "224x", "0", "-224", "1x2x3", "big", "224.0"):
        with pytest.raises(UsageError, match="expected a number of pixels"):
            parse_size(text)


def test_run_prints_what_comes_next_and_its_recipe_repeats_it(opal, squares, tmp_path):
    folder, first, second = tmp_path / "data", tmp_path / "first", tmp_path / "second"
    shutil.copytree(squares.root / "train", folder)
    (folder / "red" / "bad.jpg").touch()
    done = opal("train", folder, *SMALL, "--epochs", 1, "--seed", 3, "--prototypes", 2, "--no-cws", "--out", first)
    assert done.returncode == 0, done.stderr
    assert "warning: 1 file cannot be used, left out: red/bad.jpg" in done.stderr
    assert f"read as imagefolder from {folder}: 3 classes, 24 training, 6 validation images" in done.stderr
    assert "the data set has no test images" in done.stderr
    assert done.stderr.splitlines()[-1] == f"Next: opal-deploy export {first / 'best.pt'}"
    assert checkpoint.load(first / "best.pt").class_names == ["blue", "green", "red"]

    again = opal("train", folder, "--recipe", first / "recipe.toml", "--out", second)
    assert again.returncode == 0, again.stderr
    assert (second / "recipe.toml").read_bytes() == (first / "recipe.toml").read_bytes()
    weights = [checkpoint.load(out / "best.pt").network.state_dict() for out in (first, second)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert checkpoint.load(second / "best.pt").network.config.head.cws is False


@pytest.mark.parametrize(
    ("cores", "device", "processes", "workers"), [(64, "cuda", 8, 6), (2, "cuda", 1, 1), (16, "cpu", 1, 1)]
)
def test_the_processes_that_prepare_images_share_the_cores(monkeypatch, cores, device, processes, workers):
    monkeypatch.setattr("opal_deploy.train.machine.available_cpus", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert default_num_workers(torch.device(device), cached=False) == workers


def test_interrupted_training_names_the_command_that_resumes_it(opal, squares, tmp_path, monkeypatch):
    monkeypatch.setattr("opal_deploy.train.loop.fit", Mock(side_effect=KeyboardInterrupt))
    shutil.copytree(squares.root / "train", tmp_path / "my data")
    done = opal("train", "my data", *SMALL, "--overwrite", "--epochs", 3, cwd=tmp_path)
    assert done.returncode == ExitCode.INTERRUPTED
    options = f"--recipe paper --backbone {SMALL_BACKBONE} --weights none --size 64 --epochs 3"
    assert f"resume with: opal-deploy train 'my data' {options} --resume\n" in done.stderr


def test_tensorboard_logs_each_epoch(opal, squares, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = opal("train", squares.root, *SMALL, "--epochs", 2, "--tensorboard", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("val_loss")] == [1, 2]
    assert {"train_loss", "val_accuracy", "images_per_second", "data_wait"} <= set(events.Tags()["scalars"])
