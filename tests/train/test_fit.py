"""The loop, end to end on colored squares: what it writes, which epoch wins, what it refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.inspect import inspect
from opal_deploy.datasets.location import PATHS, find_root
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.model import checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, PLAIN_CLASSIFIER, HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.statistics import choose_threshold
from opal_deploy.train import loop, run_directory
from opal_deploy.train.attention import NetworkTerms, measure_disagreement
from opal_deploy.train.epoch import Objective, TrainStep, evaluate
from opal_deploy.train.images import Batches, TrainImages, normalize
from opal_deploy.train.loop import DivergenceError, fit
from opal_deploy.train.machine import MixedPrecision, ProcessGroup, join_process_group
from opal_deploy.train.recipe import TrainOptions
from opal_deploy.train.run_directory import FILES, TrainRunDirectory, _draw_curves
from tests.authors import AuthorsModel
from tests.builders import SMALL_BACKBONE

OPTIONS = TrainOptions(
    backbone=SMALL_BACKBONE, epochs=2, batch_size=8, lr=1e-3, input_size=(64, 64),
    head=HeadConfig(prototypes_per_class=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(squares, tmp_path_factory):
    lines, steps, legends, save = [], [], [], Figure.savefig

    def savefig(figure, *args, **options):
        legends.append(figure.axes[0].get_legend_handles_labels()[1])
        save(figure, *args, **options)

    out = tmp_path_factory.mktemp("runs") / "deeper" / "x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "_draw_curves", _draw_curves)
        patch.setattr(Figure, "savefig", savefig)
        result = fit(squares, OPTIONS, out, progress=lambda done, total, note: steps.append(done), log=lines.append)
    return result, lines, steps, legends


def test_files_of_a_run_are_plain_values(run):
    result, lines, steps, legends = run
    out = result.best.parent
    assert {path.name for path in out.iterdir()} == set(FILES)
    assert (out / "metrics.csv").read_text().startswith("epoch,train_loss,train_accuracy,val_loss,val_accuracy,")
    assert TrainRunDirectory(out).read_epochs() == result.epochs
    assert [record.epoch for record in result.epochs] == [1, 2]
    with Image.open(out / "curves.png") as image:
        assert image.format == "PNG"
        assert image.width > 500
    assert legends[0] == ["training (augmented)", "validation", "best"]
    start, estimate, *epochs = lines
    assert start == (
        f"training {SMALL_BACKBONE}, random weights, 2 prototypes per class: 2 epochs of all layers in batches of 8, "
        "learning rate 0.001"
    )
    assert " left, at " in estimate
    assert [line.split(":")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    assert 60 in steps  # 24 training and 6 validation images, twice
    config = json.loads((out / "config.json").read_text())
    assert (config["options"]["lr"], config["data"]["train"], config["weights"]) == (1e-3, 24, {"origin": "random"})
    assert config["device"] in ("cpu", "cuda")
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
    assert find_root(training) is None
    # checkpoints of earlier versions have the whole path, which is not written again
    earlier = replace(checkpoint.load(run[0].best), training={"data": {"root": str(squares.root)}})
    assert find_root(earlier.training) == squares.root
    assert str(squares.root) not in checkpoint.build_metadata(earlier).to_json()


def test_best_has_the_lowest_validation_loss_and_its_own_test_metrics(run, squares):
    result = run[0]
    losses = [record.val_loss for record in result.epochs]
    assert result.best_epoch == 1 + losses.index(min(losses))
    stored = checkpoint.load(result.best)
    val, test = (evaluate(stored.network, Batches(TrainImages(s, (64, 64)), 64)) for s in (squares.val, squares.test))
    assert val.loss == pytest.approx(min(losses), abs=1e-6)
    assert stored.metrics["test_accuracy"] == test.accuracy
    assert stored.metrics["test_images"] == 9
    assert stored.metrics["test_loss"] == pytest.approx(test.loss, abs=1e-6)
    assert stored.metrics["spatial_prototype_collapse"] == test.spatial_prototype_collapse
    assert json.loads((result.best.parent / "summary.json").read_text())["test_accuracy"] == test.accuracy


def test_a_backbone_in_lower_precision_is_judged_with_a_float32_head(run, squares):
    network = checkpoint.load(run[0].best).network
    seen = []
    network.head.projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    batches = Batches(TrainImages(squares.val, (64, 64)), 64)
    exact, rounded = (evaluate(network, batches, amp=amp) for amp in (None, MixedPrecision("cpu", torch.bfloat16)))
    assert set(seen) == {torch.float32}
    assert rounded.loss != exact.loss
    assert rounded.loss == pytest.approx(exact.loss, rel=0.02)
    assert rounded.spatial_prototype_collapse == pytest.approx(exact.spatial_prototype_collapse, abs=0.2)


def test_risk_curve_and_calibration_are_kept_from_training_to_inspect(run, squares, capsys):
    best = run[0].best
    stored = checkpoint.load(best)
    metadata = checkpoint.build_metadata(stored)
    assert (metadata.risk["split"], metadata.risk["images"]) == ("val", 6)
    assert metadata.risk["error"] == pytest.approx(1 - stored.metrics["val_accuracy"])
    again = evaluate(stored.network, Batches(TrainImages(squares.val, (64, 64)), 64)).risk
    assert {**metadata.risk, "levels": None} == {"split": "val", **again, "levels": None}
    assert np.array(metadata.risk["levels"]) == pytest.approx(np.array(again["levels"]), abs=1e-5)
    # every metric in the training record is a single number
    assert not [value for value in metadata.training["metrics"].values() if isinstance(value, dict)]
    # through the file, and from there a threshold can be chosen, or refused
    read_back = Metadata.from_json(metadata.to_json())
    assert read_back.risk == metadata.risk
    assert read_back.calibration == run[0].calibration.to_dict()
    assert read_back.temperature is None
    assert "6 labelled images cannot show" in choose_threshold(read_back.risk, 0.05).reason
    inspect(best)
    shown = capsys.readouterr().err
    assert "6 val images: error" in next(line for line in shown.splitlines() if line.startswith("risk"))
    assert "levels" not in shown
    assert "calibration  not calibrated: 6 validation images, but at least 50 are needed" in shown


def test_a_run_is_replaced_only_with_overwrite_and_once_the_new_one_can_start(squares, tmp_path):
    (tmp_path / "best.pt").write_text("precious")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"already holds a run \(best.pt\); give --resume to continue it"):
        fit(squares, OPTIONS, tmp_path)
    with pytest.raises(UsageError, match="no such weights file"):
        fit(squares, replace(OPTIONS, weights="nowhere.pth"), tmp_path, overwrite=True)
    assert (tmp_path / "best.pt").read_text() == "precious"
    fit(squares, replace(OPTIONS, epochs=1), tmp_path, overwrite=True)
    assert checkpoint.load(tmp_path / "best.pt").metrics["epoch"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("head", [LINEAR_BASELINE, PLAIN_CLASSIFIER], ids=["linear", "plain"])
def test_a_classifier_to_compare_with_has_no_collapse_and_no_risk_curve(squares, tmp_path, head):
    squares = replace(squares, test=squares.test[:3])
    result = fit(squares, replace(OPTIONS, epochs=1, head=head), tmp_path)
    assert result.test.spatial_prototype_collapse is None
    stored = checkpoint.load(result.best)
    assert "spatial_prototype_collapse" not in stored.metrics
    metadata = checkpoint.build_metadata(stored)
    assert (metadata.risk, metadata.evidence, metadata.outputs) == ({}, "none", ("logits",))
    assert stored.network.config.head == head


def test_lowest_validation_loss_wins_without_test_images_too(squares, tmp_path, monkeypatch):
    losses = iter([0.9, 0.3, 0.3, 0.7])
    monkeypatch.setattr(loop, "evaluate", lambda network, batches, **_: Evaluation(6, next(losses), 0.5))
    result = fit(replace(squares, test=[]), replace(OPTIONS, epochs=4), tmp_path)
    assert result.best_epoch == 2  # of equals the earlier
    assert result.test is None
    assert "test_accuracy" not in json.loads((tmp_path / "summary.json").read_text())
    best = checkpoint.load(tmp_path / "best.pt")
    assert best.metrics["epoch"] == 2
    assert best.receptive_field is not None
    assert (best.receptive_field.size, best.receptive_field.images) == (167, 6)
    assert checkpoint.build_metadata(best).receptive_field["effective"] > 0
    assert checkpoint.load(tmp_path / "last.pt").metrics["epoch"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(OPTIONS, device="tpu"), "expected auto, cpu, cuda"),
        (replace(OPTIONS, device="cuda:99"), "CUDA GPU|no NVIDIA driver"),
        (replace(OPTIONS, backbone="resnet19"), "no such classifier"),
        (replace(OPTIONS, input_size=(100, 100)), "multiples of its stride"),
        (replace(OPTIONS, precision="fp16", device="cpu"), "precision fp16 on a CPU"),
        (replace(OPTIONS, input_size=(32, 32), batch_size=1), "batch normalisation needs two values"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(squares, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        fit(squares, options, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_data_set_put_together_in_code_needs_validation(tmp_path):
    bare = DataSet(tmp_path, "code", ["a", "b"], [Sample(tmp_path / "x.png", 0)], [], [])
    with pytest.raises(UsageError, match="training and validation images are needed"):
        fit(bare, OPTIONS, tmp_path / "out")


def test_nonfinite_loss_lists_its_batch_whatever_the_files_are_called(squares, tmp_path):
    root = tmp_path / "a\udcff\nb"
    shutil.copytree(squares.root, root)
    with pytest.raises(DivergenceError, match=r"training loss is \w+ in epoch 1, step \d, .*smaller --lr"):
        fit(read_dataset(root), replace(OPTIONS, lr=1e30), tmp_path / "run")
    names = (tmp_path / "run" / "nonfinite_batch.txt").read_text(encoding="utf-8").splitlines()
    assert len(names) == 8
    assert all(name.startswith(str(tmp_path)) and "a\\xff\\x0ab" in name for name in names)


def test_bfloat16_on_a_cpu_keeps_float32_weights(squares, tmp_path):
    fit(squares, replace(OPTIONS, epochs=1, precision="bf16", device="cpu"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["precision"] == "bf16"
    weights = torch.load(tmp_path / "best.pt", weights_only=True)["state_dict"]
    assert {value.dtype for key, value in weights.items() if key.endswith("weight")} == {torch.float32}


def test_exhausted_memory_is_one_line(squares, tmp_path, monkeypatch):
    def step(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("opal_deploy.train.epoch.TrainStep.step", step)
    with pytest.raises(StoppedEarly, match=r"out of memory on cpu with batches of 8 images of 64x64"):
        fit(squares, replace(OPTIONS, device="cpu"), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_trains_as_a_plain_one(squares, tmp_path):
    # small steps: Adam's first ones have the size of the learning rate whatever the gradient, so that rounding decides
    # where gradients are nearly zero
    options = replace(OPTIONS, epochs=1, lr=1e-6, device="cpu")
    plain, compiled = (
        fit(squares, replace(options, compile=wanted), tmp_path / str(wanted)) for wanted in (False, True)
    )
    assert compiled.epochs[0].train_loss == pytest.approx(plain.epochs[0].train_loss, rel=1e-3)


@pytest.mark.data
@pytest.mark.slow
def test_three_epochs_on_ten_species_are_far_above_chance(cub_mini, shared_weights, tmp_path):
    weights = str(shared_weights / "resnet18_ktb_small.safetensors")
    test = fit(read_dataset(cub_mini), TrainOptions(backbone="resnet18", weights=weights, epochs=3), tmp_path).test
    assert test.accuracy > 0.5
    assert test.spatial_prototype_collapse < 0.15


def test_training_steps_are_the_authors(tmp_path):
    """Adam without weight decay, batch statistics, stochastic depth: their steps and ours give the same weights."""
    theirs = AuthorsModel("efficientnet_v2_s")
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    network = checkpoint.load(tmp_path / "theirs.pth").network
    first = {key: value.clone() for key, value in theirs.backbone.state_dict().items()}
    pixels, labels = torch.randint(0, 256, (2, 8, 64, 64, 3), dtype=torch.uint8), torch.randint(0, 4, (2, 8))
    mean, std = network.config.mean, network.config.std

    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-4)
    torch.manual_seed(1)
    theirs.train()
    for images, targets in zip(pixels, labels, strict=True):
        optimizer.zero_grad()
        torch.nn.CrossEntropyLoss()(theirs(normalize(images, mean, std)), targets).backward()
        optimizer.step()

    with join_process_group("cpu") as group:
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
        model, amp = NetworkTerms(network.train()), MixedPrecision.select(group.device, "fp32")
        step = TrainStep(model, optimizer, amp, group, mean, std, Objective())
        torch.manual_seed(1)
        for images, targets in zip(pixels, labels, strict=True):
            step.step(images, targets, len(targets))

    found, expected = network.backbone.body.state_dict(), theirs.backbone.state_dict()
    weights = [key for key, value in expected.items() if value.is_floating_point()]
    difference = sum(float((found[key] - expected[key]).square().sum()) for key in weights)
    assert difference < 1e-4 * sum(float((expected[key] - first[key]).square().sum()) for key in weights)


def test_the_whole_model_is_on_the_device():
    """Tensors of the loss, too, which no file holds: on a GPU, training stopped at its first step for one of them."""
    model = NetworkTerms(OpalNetwork(NetworkConfig(SMALL_BACKBONE, 2, (64, 64))), adversarial=True)
    wrapped = ProcessGroup(torch.device("meta")).wrap_ddp(model)
    assert {tensor.device.type for tensor in (*wrapped.parameters(), *wrapped.buffers())} == {"meta"}


# mirror agreement -----------------------------------------------------------------------------------------------------

# of two classes of one slot each
_SECOND_CLASS = torch.tensor([[1]])


def one_cell(row, col):
    attention = torch.zeros(1, 2, 4, 4)
    attention[0, 1, row, col] = 1.0
    return attention


def test_the_same_cell_costs_nothing_and_another_much():
    same, other = (measure_disagreement(one_cell(1, 2), one_cell(*cell), _SECOND_CLASS) for cell in ((1, 2), (1, 3)))
    assert same.item() == pytest.approx(0, abs=1e-6)
    assert other.item() > 10
    # slots of other classes do not count
    elsewhere = one_cell(1, 2)
    elsewhere[0, 0, 3, 3] = 1.0
    assert measure_disagreement(one_cell(1, 2), elsewhere, _SECOND_CLASS).item() == pytest.approx(0, abs=1e-6)


def test_training_on_it_brings_the_mirrored_cell_back():
    torch.manual_seed(0)
    head = HeadConfig(prototypes_per_class=2)
    network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 2, (64, 64), head, stride=16)).eval()
    model = NetworkTerms(network, agreement=True)
    images, labels = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 0, 1])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        disagreement = model(images, labels, None).disagreement
        optimizer.zero_grad()
        disagreement.mean().backward()
        optimizer.step()
        losses.append(disagreement.mean().item())
    # in evaluation mode the first half is the plain network's
    torch.testing.assert_close(model(images, labels, None).logits[:4], network(images))
    assert losses[-1] < 0.5 * losses[0]
