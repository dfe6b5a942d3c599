"""`opal-deploy train`: from options to a run."""

import json
import shutil

import pytest
import torch

from opal_deploy.cli.options import parse_size
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint

SMALL = ("--backbone", "shufflenet_v2_x0_5", "--weights", "none", "--size", "64")


@pytest.mark.parametrize(("text", "expected"), [("224", (224, 224)), ("224x448", (224, 448)), ("32X64", (32, 64))])
def test_size_is_one_number_or_height_x_width(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "224x", "0", "-224", "1x2x3", "big", "224.0"])
def test_other_sizes_are_refused(text):
    with pytest.raises(UsageError, match="expected a number of pixels"):
        parse_size(text)


def test_run_prints_what_comes_next_and_its_recipe_repeats_it(opal, squares, tmp_path):
    folder, first, second = tmp_path / "data", tmp_path / "first", tmp_path / "second"
    shutil.copytree(squares.root / "train", folder)
    (folder / "red" / "bad.jpg").touch()
    done = opal("train", folder, *SMALL, "--epochs", 1, "--seed", 3, "--prototypes", 2, "--no-cws", "--out", first)
    assert done.returncode == 0, done.stderr
    assert "warning: 1 of 31 files cannot be used, left out: red/bad.jpg (zero bytes)" in done.stderr
    assert f"read as imagefolder from {folder}: 3 classes, 24 images to train on, 6 to validate" in done.stderr
    assert "the data set has no test images" in done.stderr
    assert done.stderr.endswith(f"next: opal-deploy export {first / 'best.pt'}\n")
    assert checkpoint.load(first / "best.pt").class_names == ["blue", "green", "red"]

    again = opal("train", folder, "--recipe", first / "recipe.toml", "--out", second)
    assert again.returncode == 0, again.stderr
    assert (second / "recipe.toml").read_bytes() == (first / "recipe.toml").read_bytes()
    weights = [checkpoint.load(out / "best.pt").network.state_dict() for out in (first, second)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert checkpoint.load(second / "best.pt").network.config.head.cws is False


def test_tensorboard_logs_each_epoch(opal, squares, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = opal("train", squares.root, *SMALL, "--epochs", 2, "--tensorboard", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("val_loss")] == [1, 2]
    assert {"train_loss", "val_accuracy", "images_per_second", "data_wait"} <= set(events.Tags()["scalars"])


def test_a_finer_stride_is_trained_exported_and_explained_in_its_cells(opal, squares, tmp_path):
    small = ("--backbone", "resnet18", "--weights", "none", "--size", "64", "--stride", 8, "--prototypes", 2)
    done = opal("train", squares.root, *small, "--epochs", 1, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    best = tmp_path / "run" / "best.pt"
    assert "stride = 8\n" in (tmp_path / "run" / "recipe.toml").read_text()
    network = checkpoint.load(best).network
    assert (network.config.stride, network.grid) == (8, (8, 8))
    done = opal("export", best)
    assert done.returncode == 0, done.stderr
    images = squares.root / "test" / "red"
    done = opal("infer", images, "--model", best.with_suffix(".onnx"), "--explain", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines():
        for slot in json.loads(line)["evidence"]:
            row, col = slot["cell"]
            # the images are 56 x 48 pixels, in 8 x 8 cells
            assert slot["box"] == pytest.approx([7 * col, 6 * row, 7 * col + 7, 6 * row + 6])
    done = opal("inspect", best.with_suffix(".onnx"))
    assert "grid 8x8, cells of 8 pixels" in done.stderr
