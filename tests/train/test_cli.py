"""`opal-deploy train`: from options to a run."""

import json
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from opal_deploy import train_model
from opal_deploy.artifact.onnx_file import read_metadata
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
    assert "warning: 1 file cannot be used, left out: red/bad.jpg (zero bytes)" in done.stderr
    assert f"read as imagefolder from {folder}: 3 classes, 24 training, 6 validation images" in done.stderr
    assert "the data set has no test images" in done.stderr
    recommended, following = done.stderr.splitlines()[-2:]
    assert recommended.startswith("For boxes that say more, train with --stride 16")
    assert following == f"Next: opal-deploy export {first / 'best.pt'}"
    assert checkpoint.load(first / "best.pt").class_names == ["blue", "green", "red"]

    again = opal("train", folder, "--recipe", first / "recipe.toml", "--out", second)
    assert again.returncode == 0, again.stderr
    assert (second / "recipe.toml").read_bytes() == (first / "recipe.toml").read_bytes()
    weights = [checkpoint.load(out / "best.pt").network.state_dict() for out in (first, second)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert checkpoint.load(second / "best.pt").network.config.head.cws is False


def test_the_function_trains_what_the_command_trains_and_prints_nothing(squares, tmp_path, opal, capsys):
    small = {
        "recipe": "paper",
        "backbone": SMALL_BACKBONE,
        "weights": "none",
        "size": 64,
        "epochs": 2,
        "device": "cpu",
    }
    lines, notes, out = [], [], tmp_path / "run"

    def stop(line):
        lines.append(line)
        if line.startswith("epoch 1/2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_model(squares.root, **small, out=out, log=stop)
    result = train_model(
        squares.root, **small, out=out, resume=True, log=lines.append, progress=lambda *each: notes.append(each)
    )
    assert capsys.readouterr() == ("", "")
    assert (result.best, result.last) == (out / "best.pt", out / "last.pt")
    assert "resuming after epoch 1" in lines
    assert len([line for line in lines if line.startswith("epoch ")]) == len(result.epochs) == 2
    assert notes[-1][:2] == (9, 9)  # the test images
    assert (result.val.images, result.test.images) == (6, 9)
    assert json.loads(json.dumps(result.to_dict()))["test"]["accuracy"] == result.test.accuracy
    assert result.config["options"]["input_size"] == (64, 64)

    done = opal("train", squares.root, *SMALL, "--epochs", 2, "--device", "cpu", "--out", tmp_path / "command")
    assert done.returncode == 0, done.stderr
    weights = [checkpoint.load(each / "best.pt").network.state_dict() for each in (out, tmp_path / "command")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head": "opals"}, "head 'opals': expected one of opal, linear, plain"),
        ({"distance": "l9"}, "l9"),
        ({"size": (64, 0)}, "input size"),
        ({"prototypes": 0}, "at least 1"),
        ({"recipe": "best"}, "not one of grounded"),
        ({"data": "nothing"}, "no such folder"),
    ],
)
def test_wrong_arguments_of_the_function_are_one_line(squares, tmp_path, wrong, message):
    with pytest.raises(UsageError, match=message) as caught:
        train_model(**{"data": squares.root, "out": tmp_path / "run", **wrong})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_no_process_is_started_that_would_run_the_callers_script_again(monkeypatch):
    cuda = torch.device("cuda")
    assert default_num_workers(cuda, cached=False) > 0
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: "spawn")
    assert default_num_workers(cuda, cached=False) > 0  # the command's own script is safe
    monkeypatch.delitem(sys.modules, "opal_deploy.cli")
    assert default_num_workers(cuda, cached=False) == 0


@pytest.mark.parametrize(
    ("cores", "device", "processes", "workers"),
    [
        (16, "cuda", 1, 14),
        (64, "cuda", 8, 6),
        (3, "cuda", 1, 1),
        (2, "cuda", 1, 1),
        (8, "cuda", 8, 1),
        (16, "cpu", 1, 1),
    ],
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


# timm -----------------------------------------------------------------------------------------------------------------


def test_a_timm_network_trains_exports_and_explains(opal, squares, lite0_weights, tmp_path):
    run, results = tmp_path / "run", tmp_path / "results"
    train = (
        "train", squares.root, "--backbone", "timm:tf_efficientnet_lite0", "--weights", lite0_weights, "--size", "64",
        "--stride", "16", "--lr", "1e-3", "--augment", "none", "--out", run,
    )  # fmt: skip
    done = opal(*train, "--epochs", 4)
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((run / "summary.json").read_text())["test_accuracy"]
    assert accuracy > 0.8
    assert checkpoint.load(run / "best.pt").network.grid == (4, 4)

    for precision in ("fp32", "fp16"):
        done = opal("export", run / "best.pt", "--precision", precision)
        assert done.returncode == 0, done.stderr
    metadata = read_metadata(run / "best.onnx")
    assert metadata.mean == metadata.std == (0.5, 0.5, 0.5)
    assert metadata.training["weights"]["pretrained_cfg"]["license"] == "apache-2.0"
    done = opal("inspect", run / "best.onnx")
    assert "mean 0.5, 0.5, 0.5; std 0.5, 0.5, 0.5" in done.stderr
    assert "in1k: licence apache-2.0, made with bicubic, center crop 0.875 of 224x224" in done.stderr

    done = opal("infer", squares.root / "test", "--model", run / "best.onnx", "--explain", "--out", results)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (results / "results.jsonl").read_text().splitlines()]
    # the runtime's pixels are the trainer's
    assert np.mean([r["prediction"]["label"] == Path(r["image"]).parent.name for r in records]) == accuracy
    assert all(len(r["evidence"]) == 5 for r in records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backbone", "timm:resnt18"), "did you mean resnet18"),
        (("--backbone", "timm:resnet18", "--weights", "tv_in2k"), "no timm tag for resnet18 (a1_in1k, "),
    ],
)
def test_a_wrong_name_ends_training_with_one_line(opal, squares, tmp_path, options, message):
    done = opal("train", squares.root, *options, "--size", "64", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
