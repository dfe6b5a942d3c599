"""The loop, end to end on colored squares: what it writes, which epoch wins, what it refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from opal_deploy import train_model
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import PATHS, find_root
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.model import checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import loop
from opal_deploy.train.images import Batches, TrainImages, normalize
from opal_deploy.train.loop import DivergenceError, Trained, train_step
from opal_deploy.train.losses import NetworkTerms, Objective
from opal_deploy.train.machine import start_fabric
from opal_deploy.train.run_directory import FILES
from tests.authors import AuthorsModel
from tests.builders import SMALL_BACKBONE
from tests.train.fitting import evaluate, fit, read_epochs, small

OPTIONS = small(backbone=SMALL_BACKBONE, epochs=2, batch_size=8, lr=1e-3, size=64)


@pytest.fixture(scope="module")
def run(squares, tmp_path_factory):
    lines, steps, first = [], [], []
    out = tmp_path_factory.mktemp("runs") / "deeper" / "x"

    def log(line):
        lines.append(line)
        if line.startswith("epoch 1"):
            first.append(checkpoint.load(out / "best.pt"))

    result = fit(squares, OPTIONS, out, progress=lambda done, total, note: steps.append(done), log=log)
    return result, lines, steps, *first


def test_files_of_a_run_are_plain_values(run):
    result, lines, steps, _ = run
    out = result.best.parent
    assert {path.name for path in out.iterdir()} == set(FILES) - {"answers.csv", "doubtful.html"}
    assert (out / "metrics.csv").read_text().startswith("epoch,train_loss,train_accuracy,val_loss,val_accuracy,")
    assert read_epochs(out) == result.epochs
    assert [record.epoch for record in result.epochs] == [1, 2]
    cost, start, *epochs = lines
    assert cost.startswith("24 training, 6 validation, 9 test images; 2 epochs of about 1 s each, ")
    assert start.endswith("2 prototypes per class: 2 epochs in batches of 8, learning rate 0.001")
    assert [line.split(":")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    assert 60 in steps  # 24 training and 6 validation images, twice
    config = json.loads((out / "config.json").read_text())
    assert (config["options"]["lr"], config["data"]["train"], config["weights"]) == (1e-3, 24, {"origin": "random"})
    assert {"opal-deploy", "torch", "pillow"} <= config["versions"].keys()
    for name in ("best.pt", "last.pt"):
        raw = torch.load(out / name, weights_only=True)
        assert (raw["class_names"], raw["crop"]) == (["blue", "green", "red"], None)
        assert raw["training"]["options"]["seed"] == 0


def test_a_run_can_be_passed_on_without_the_folders_of_its_files_and_finds_them_here(run, squares):
    out = run[0].best.parent
    for path in out.iterdir():
        if path.name != PATHS:
            assert str(squares.root.parent).encode() not in path.read_bytes(), path.name
    training = checkpoint.load(run[0].best).training
    assert training["data"]["root"] == squares.root.name
    assert find_root(training, run[0].best) == squares.root


def test_best_has_the_lowest_validation_loss_and_its_own_test_metrics(run, squares):
    result = run[0]
    losses = [record.val_loss for record in result.epochs]
    assert result.best_epoch == 1 + losses.index(min(losses))
    stored = checkpoint.load(result.best)
    val, test = (evaluate(stored.network, Batches(TrainImages(s, (64, 64)), 64)) for s in (squares.val, squares.test))
    assert val.loss == pytest.approx(min(losses), abs=1e-6)
    assert stored.metrics["test_accuracy"] == test.accuracy
    assert stored.metrics["test_images"] == 9
    assert stored.metrics["spatial_prototype_collapse"] == test.spatial_prototype_collapse
    assert json.loads((result.best.parent / "summary.json").read_text())["test_accuracy"] == test.accuracy


def test_best_is_complete_whenever_it_exists(run, squares):
    first, last = run[-1], checkpoint.load(run[0].best)
    assert (first.metrics["epoch"], first.metrics["val_images"]) == (1, len(squares.val))
    assert None not in (first.receptive_field, first.calibration, first.baseline, first.patches)
    # test images are answered once, in the end
    assert "test_images" not in first.metrics
    assert last.metrics["test_images"] == 9


def test_images_that_cannot_be_decoded_are_left_out_with_one_warning(squares, tmp_path):
    root, lines = tmp_path / "data", []
    shutil.copytree(squares.root, root)
    for name in ("train/red/00.png", "train/blue/01.png", "test/red/01.png"):
        (root / name).write_bytes((root / name).read_bytes()[:2000])
    result = fit(read_dataset(root), replace(OPTIONS, epochs=1), tmp_path / "run", log=lines.append)
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert "3 image(s)" in warning
    assert "blue/01.png" in warning
    assert result.test.images == 8
    assert result.config["data"]["train"] + result.val.images == 28


def test_risk_curve_and_calibration_are_kept_in_the_checkpoint(run, squares):
    stored = checkpoint.load(run[0].best)
    metadata = checkpoint.build_metadata(stored)
    assert (metadata.risk["split"], metadata.risk["images"]) == ("val", 6)
    assert metadata.risk["error"] == pytest.approx(1 - stored.metrics["val_accuracy"])
    again = evaluate(stored.network, Batches(TrainImages(squares.val, (64, 64)), 64)).risk
    assert np.array(metadata.risk["levels"]) == pytest.approx(np.array(again["levels"]), abs=1e-5)
    # every metric in the training record is a single number
    assert not [value for value in metadata.training["metrics"].values() if isinstance(value, dict)]
    assert metadata.calibration == run[0].calibration.to_dict()


def test_a_run_is_replaced_only_with_overwrite_and_once_the_new_one_can_start(squares, tmp_path):
    (tmp_path / "best.pt").write_text("precious")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="--resume"):
        fit(squares, OPTIONS, tmp_path)
    with pytest.raises(UsageError, match="no such weights file"):
        fit(squares, replace(OPTIONS, weights="nowhere.pth"), tmp_path, overwrite=True)
    assert (tmp_path / "best.pt").read_text() == "precious"
    fit(squares, replace(OPTIONS, epochs=1), tmp_path, overwrite=True)
    assert checkpoint.load(tmp_path / "best.pt").metrics["epoch"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_classifier_to_compare_with_has_no_collapse_and_no_risk_curve(squares, tmp_path):
    result = fit(replace(squares, test=squares.test[:3]), replace(OPTIONS, epochs=1, head="linear"), tmp_path)
    assert result.test.spatial_prototype_collapse is None
    stored = checkpoint.load(result.best)
    metadata = checkpoint.build_metadata(stored)
    assert (metadata.risk, metadata.evidence, metadata.outputs) == ({}, "none", ("logits",))
    assert stored.network.config.head == LINEAR_BASELINE


def test_lowest_validation_loss_wins_without_test_images_too(squares, tmp_path, monkeypatch):
    losses = iter([0.9, 0.3, 0.3, 0.7])
    measured = Evaluation(images=6, loss=0.9, accuracy=0.5)
    monkeypatch.setattr(loop, "validate", lambda *_, **__: (None, replace(measured, loss=next(losses))))
    result = fit(replace(squares, test=[]), replace(OPTIONS, epochs=4), tmp_path)
    assert (result.best_epoch, result.test) == (2, None)  # of equals the earlier
    assert "test_accuracy" not in json.loads((tmp_path / "summary.json").read_text())
    best = checkpoint.load(tmp_path / "best.pt")
    assert (best.metrics["epoch"], best.receptive_field.size, best.receptive_field.images) == (2, 167, 6)
    assert checkpoint.load(tmp_path / "last.pt").metrics["epoch"] == 4


def test_near_copies_of_training_images_are_named_and_the_others_measured_apart(write_squares, tmp_path):
    root = write_squares(tmp_path / "data", {"train": (6, 6, 6), "val": (2, 2, 2), "test": (2, 2, 2)})
    for name in ("blue", "green"):
        with Image.open(root / "train" / name / "03.png") as image:
            image.save(root / "test" / name / "again.jpg", quality=95)
    lines = []
    result = fit(read_dataset(root), replace(OPTIONS, epochs=1), tmp_path / "out", log=lines.append)
    (line,) = [line for line in lines if "near copies" in line]
    assert "2 near copies" in line
    assert "test/blue/again.jpg = train/blue/03.png, test/green/again.jpg = train/green/03.png" in line
    assert (result.test.images, result.without_copies.images) == (8, 6)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["test_accuracy_without_copies"] == result.without_copies.accuracy


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "cuda:99"}, "CUDA GPU|no NVIDIA driver"), ({"batch_size": 1}, "at least 2 images")],
)
def test_impossible_options_are_refused_before_anything_is_written(squares, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        fit(squares, replace(OPTIONS, **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_is_one_line_and_the_best_epoch_is_kept(squares, tmp_path, monkeypatch):
    with pytest.raises(DivergenceError, match="no epoch"):
        fit(squares, replace(OPTIONS, lr=1e30), tmp_path / "first")
    rates = iter([1e-3] * 6 + [1e30] * 9)
    monkeypatch.setattr(loop, "learning_rate", lambda *_: next(rates))
    with pytest.raises(DivergenceError, match=r"epoch 3.*best\.pt holds epoch 2") as caught:
        fit(squares, replace(OPTIONS, epochs=3), tmp_path / "run")
    assert "\n" not in str(caught.value)
    best = checkpoint.load(tmp_path / "run" / "best.pt")
    assert (best.metrics["epoch"], best.baseline is None) == (2, False)


def test_bfloat16_on_a_cpu_keeps_float32_weights_and_a_float32_head(squares, tmp_path):
    fit(squares, replace(OPTIONS, epochs=1, precision="bf16"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["precision"] == "bf16"
    weights = torch.load(tmp_path / "best.pt", weights_only=True)["state_dict"]
    assert {value.dtype for key, value in weights.items() if key.endswith("weight")} == {torch.float32}


def test_exhausted_memory_is_one_line(squares, tmp_path, monkeypatch):
    def step(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(StoppedEarly, match="out of memory"):
        fit(squares, OPTIONS, tmp_path)


# steps ----------------------------------------------------------------------------------------------------------------


def make_trained(network):
    fabric, _ = start_fabric("cpu", "fp32")
    model, optimizer = fabric.setup(NetworkTerms(network.train()), torch.optim.Adam(network.parameters(), lr=1e-4))
    return fabric, Trained(network, model, optimizer, Objective())


def test_training_steps_are_the_authors(tmp_path):
    """Adam without weight decay, batch statistics, stochastic depth: their steps and ours give the same weights."""
    authors = AuthorsModel("efficientnet_v2_s")
    torch.save(authors.state_dict(), tmp_path / "authors.pth")
    network = checkpoint.load(tmp_path / "authors.pth").network
    first = {key: value.clone() for key, value in authors.backbone.state_dict().items()}
    pixels, labels = torch.randint(0, 256, (2, 8, 64, 64, 3), dtype=torch.uint8), torch.randint(0, 4, (2, 8))

    optimizer = torch.optim.Adam(authors.parameters(), lr=1e-4)
    torch.manual_seed(1)
    authors.train()
    for images, targets in zip(pixels, labels, strict=True):
        optimizer.zero_grad()
        inputs = normalize(images, network.config.mean, network.config.std)
        torch.nn.CrossEntropyLoss()(authors(inputs), targets).backward()
        optimizer.step()

    fabric, trained = make_trained(network)
    torch.manual_seed(1)
    for images, targets in zip(pixels, labels, strict=True):
        train_step(fabric, trained, images, targets, len(targets))

    actual, expected = network.backbone.body.state_dict(), authors.backbone.state_dict()
    weights = [key for key, value in expected.items() if value.is_floating_point()]
    difference = sum(float((actual[key] - expected[key]).square().sum()) for key in weights)
    assert difference < 1e-4 * sum(float((expected[key] - first[key]).square().sum()) for key in weights)


def test_every_step_normalises_as_the_network_says(squares):
    config = NetworkConfig(SMALL_BACKBONE, 3, (64, 64), mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    network, seen = OpalNetwork(config), []
    fabric, trained = make_trained(network)
    # receptive fields are computed on meta tensors, which have no values
    network.backbone.register_forward_pre_hook(lambda _, inputs: None if inputs[0].is_meta else seen.append(inputs[0]))
    white = torch.full((2, 64, 64, 3), 255, dtype=torch.uint8)
    train_step(fabric, trained, white, torch.tensor([0, 1]), 2)
    assert seen[0].amax((0, 2, 3)).tolist() == seen[0].amin((0, 2, 3)).tolist() == [2.0, 1.0, 0.5]
    images = TrainImages(squares.val[:1], (64, 64))
    evaluate(network, Batches(images, 1))
    pixels = torch.tensor(images[(0, 0)][0]).permute(2, 0, 1) / 255
    torch.testing.assert_close(seen[-1][0], (pixels - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1))


def test_compare_fine_tunes_the_networks_own_classifier_on_the_same_images(squares, tmp_path):
    lines, out = [], tmp_path / "run"
    options = {"backbone": SMALL_BACKBONE, "weights": "none", "size": 64, "device": "cpu", "prototypes": 2}
    result = train_model(squares.root, epochs=1, minutes=5, out=out, compare=True, log=lines.append, **options)
    plain = checkpoint.load(out / "plain" / "best.pt")
    assert (plain.network.config.head.evidence, plain.training["data"]["train"]) == ("none", 24)
    assert "own classifier, fine-tuned, without explanation" in lines[-1]
    assert f"with explanation: {result.test.accuracy:.1%} of 9" in lines[-1]
