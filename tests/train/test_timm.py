"""A timm network with real weights goes the whole way: train, resume, export, explain."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.evaluation.rankings import GradCam
from opal_deploy.model import checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.train.epoch import TrainStep, evaluate
from opal_deploy.train.images import Batches, TrainImages
from opal_deploy.train.machine import MixedPrecision, ProcessGroup
from opal_deploy.train.recipe import TrainOptions
from opal_deploy.train.reproduce.plan import run_folder_name


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


def test_every_step_normalises_as_the_network_says(squares):
    config = NetworkConfig("shufflenet_v2_x0_5", 3, (64, 64), mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    network, group = OpalNetwork(config), ProcessGroup(torch.device("cpu"))
    seen = []
    # receptive fields are computed on meta tensors, which have no values
    network.backbone.register_forward_pre_hook(lambda _, inputs: None if inputs[0].is_meta else seen.append(inputs[0]))
    white = np.full((2, 64, 64, 3), 255, np.uint8)
    optimizer = torch.optim.Adam(network.parameters())
    step = TrainStep(network, optimizer, MixedPrecision("cpu", None), group, config.mean, config.std)
    step.step(torch.from_numpy(white), torch.tensor([0, 1]), 2)
    GradCam(network)(white, np.array([0, 1]))
    TorchSession(checkpoint.Checkpoint(network, ["a", "b", "c"]), device="cpu").run(white)
    for inputs in seen:
        assert inputs.amax((0, 2, 3)).tolist() == inputs.amin((0, 2, 3)).tolist() == [2.0, 1.0, 0.5]
    assert len(seen) == 3
    images = TrainImages(squares.val[:1], (64, 64))
    evaluate(network, Batches(images, 1))
    pixels = torch.tensor(images[(0, 0)][0]).permute(2, 0, 1) / 255
    expected = (pixels - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1)
    torch.testing.assert_close(seen[-1][0], expected)


def test_a_runs_folder_has_no_colon():
    assert run_folder_name(TrainOptions("timm:resnet18.tv_in1k")) == "timm-resnet18.tv_in1k-opal-m5-l2-seed0"
    kept = TrainOptions("resnet50", stride=16, keep_layers=True)
    assert run_folder_name(kept) == "resnet50-stride16-all-layers-opal-m5-l2-seed0"


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
