"""`opal-deploy train`: from options to a run."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch

from opal_deploy.cli.options import parse_size
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import ExitCode, UsageError
from opal_deploy.model import checkpoint
from opal_deploy.train.loop import fit
from opal_deploy.train.recipe import TrainOptions

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


def test_interrupted_training_names_the_command_that_resumes_it(opal, squares, tmp_path, monkeypatch):
    monkeypatch.setattr("opal_deploy.train.loop.fit", Mock(side_effect=KeyboardInterrupt))
    shutil.copytree(squares.root / "train", tmp_path / "my data")
    done = opal("train", "my data", *SMALL, "--overwrite", "--epochs", 3, cwd=tmp_path)
    assert done.returncode == ExitCode.INTERRUPTED
    options = "--backbone shufflenet_v2_x0_5 --weights none --size 64 --epochs 3"
    assert f"resume with: opal-deploy train 'my data' {options} --resume\n" in done.stderr


def test_tensorboard_logs_each_epoch(opal, squares, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = opal("train", squares.root, *SMALL, "--epochs", 2, "--tensorboard", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("val_loss")] == [1, 2]
    assert {"train_loss", "val_accuracy", "images_per_second", "data_wait"} <= set(events.Tags()["scalars"])


def test_a_finer_stride_is_trained_exported_and_explained_in_its_cells(opal, squares, tmp_path):
    small = ("--backbone", "resnet18", "--weights", "none", "--size", "64", "--prototypes", 2)
    finer = ("--stride", 8, "--keep-layers")
    done = opal("train", squares.root, *small, *finer, "--epochs", 1, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    best = tmp_path / "run" / "best.pt"
    assert "stride = 8\nkeep_layers = true\n" in (tmp_path / "run" / "recipe.toml").read_text()
    network = checkpoint.load(best).network
    assert (network.config.stride, network.config.keep_layers, network.grid) == (8, True, (8, 8))
    assert "all layers at stride 8" in opal("inspect", best).stderr
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
    assert "grid 8x8, cells of 8 pixels, all layers kept" in done.stderr


def test_a_run_of_an_earlier_version_goes_on_with_its_own_validation_images(opal, squares, tmp_path):
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(squares.root / "train", data)
    for path in sorted(data.glob("*/0[2-5].png")):
        # among the others by path, after them as torchvision walks
        (path.parent / "01x").mkdir(exist_ok=True)
        path.rename(path.parent / "01x" / path.name)
    shutil.rmtree(data / "red" / "01x")
    earlier, today = (read_dataset(data, validation=each) for each in ("list-order", "authors"))
    assert {s.path for s in earlier.val} != {s.path for s in today.val}
    options = TrainOptions(
        "shufflenet_v2_x0_5", epochs=1, input_size=(64, 64), save_every=1, batch_size=8, device="cpu"
    )

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(earlier, options, out, log=stop)
    config = json.loads((out / "config.json").read_text())
    del config["data"]["validation"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="splits of the data set are others"):
        fit(today, options, out, resume=True)
    done = opal("train", data, *SMALL, "--epochs", 1, "--batch-size", 8, "--device", "cpu", "--out", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert 'validation = "list-order"' in (out / "recipe.toml").read_text()
    training = checkpoint.load(out / "best.pt").training
    assert (training["data"]["validation"], training["fingerprint"]) == ("list-order", config["fingerprint"])
    # its validation images are not the first model's
    other = tmp_path / "other"
    fit(today, options, other)
    done = opal("evaluate", data, "--model", out / "best.pt", "--model", other / "best.pt", "--split", "val")
    assert (done.returncode, "evaluate the two apart" in done.stderr) == (2, True), done.stderr
