"""Several processes do what one does with the same global batch."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import machine
from opal_deploy.train.images import Batches, TrainImages
from tests.builders import NORM_FREE_BACKBONE, SMALL_BACKBONE
from tests.train.fitting import evaluate, read_epochs, write_regions


@pytest.fixture(scope="module")
def folder(write_squares, tmp_path_factory):
    """27 training images, so that shares of a batch differ in size; 7 to validate, 5 to test."""
    splits = {"train": (9, 9, 9), "val": (3, 2, 2), "test": (2, 2, 1)}
    return write_squares(tmp_path_factory.mktemp("squares"), splits)


def _arguments(folder, out, *options):
    # a network without batch statistics and chance: those of a process's own share differ from the whole batch's
    return [
        "train", str(folder), "--out", str(out), "--recipe", "paper", "--backbone", NORM_FREE_BACKBONE,
        "--weights", "none", "--size", "64", "--epochs", "2", "--batch-size", "9", "--device", "cpu",
        "--prototypes", "2", "--lr", "1e-4", "--workers", "0", *options,
    ]  # fmt: skip


def _train(folder, out, *options):
    """Train with two processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "opal_deploy"]
    return subprocess.run(
        [sys.executable, *launcher, *_arguments(folder, out, *options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_two_processes_train_as_one_does(opal, folder, tmp_path):
    # an eighth of every other image is kept off
    names = sorted(path.relative_to(folder).as_posix() for path in folder.glob("train/*/*"))[::2]
    keep_off = ("--keep-off", str(write_regions(tmp_path / "regions.json", dict.fromkeys(names, (0, 0, 28, 12)))))
    one, two = opal(*_arguments(folder, tmp_path / "one", *keep_off)), _train(folder, tmp_path / "two", *keep_off)
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    # one writes and speaks
    assert two.stderr.count("epoch 1/2:") == one.stderr.count("epoch 1/2:") == 1
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}

    epochs = [read_epochs(tmp_path / name) for name in ("one", "two")]
    for a, b in zip(*epochs, strict=True):
        assert (b.train_loss, b.val_loss) == pytest.approx((a.train_loss, a.val_loss), rel=1e-4)
        assert 0 < b.kept_off == pytest.approx(a.kept_off, rel=1e-3)
        assert (b.train_accuracy, b.val_accuracy) == (a.train_accuracy, a.val_accuracy)
    first, second = (checkpoint.load(tmp_path / name / "best.pt") for name in ("one", "two"))
    for name in ("val_images", "test_images", "test_accuracy", "spatial_prototype_collapse"):
        assert second.metrics[name] == pytest.approx(first.metrics[name])
    weights = [net.network.head.projection.weight for net in (first, second)]
    torch.manual_seed(0)
    start = OpalNetwork(NetworkConfig(NORM_FREE_BACKBONE, 3, (64, 64), HeadConfig(prototypes_per_class=2)))
    moved = (weights[0] - start.head.projection.weight).abs().max()
    # the paths stay together: what separates them is rounding, small beside what training moved
    assert (weights[0] - weights[1]).abs().max() < 0.05 * moved


@pytest.mark.slow
def test_the_weights_that_are_saved_are_those_that_are_judged(folder, tmp_path):
    """Batch statistics differ between processes without a common batch norm; one process's are saved."""
    batch_norm = ("--backbone", SMALL_BACKBONE, "--lr", "0.01", "--epochs", "1", "--head-steps", "5")
    done = _train(folder, tmp_path / "run", *batch_norm)
    assert done.returncode == 0, done.stderr
    stored = checkpoint.load(tmp_path / "run" / "last.pt")
    again = evaluate(stored.network, Batches(TrainImages(read_dataset(folder).val, (64, 64)), 64))
    assert again.loss == pytest.approx(stored.metrics["val_loss"], abs=1e-6)


@pytest.mark.parametrize(("size", "count"), [(1, 17), (2, 21), (3, 40), (4, 17)])
def test_every_image_is_in_one_share_an_epoch(size, count, tmp_path):
    images = TrainImages([Sample(tmp_path / f"{index}.png", 0) for index in range(count)], (32, 32))
    for shuffle in (None, 7):
        shares = [Batches(images, 8, shuffle_seed=shuffle, share=(rank, size)) for rank in range(size)]
        for batches in shares:
            batches.epoch = 3
        seen = Counter(index for batches in shares for share in batches.local_plan() for _, index in share)
        assert seen == Counter(range(count))
        if shuffle is not None:
            # as many steps everywhere: a process without a share would leave the others waiting
            assert len({len(batches.local_plan()) for batches in shares}) == 1
            # batch normalisation cannot take a single image
            assert min(len(batch) for batches in shares for batch in batches.local_plan()) > 1


def test_one_gpu_cannot_be_asked_for_by_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(machine, "torch_device", torch.device)
    with pytest.raises(UsageError, match="each takes a GPU of its own"):
        machine.start_fabric("cuda:1", "auto")
