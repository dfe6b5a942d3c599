"""A run that is killed at any moment goes on as if nothing had happened."""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.model import checkpoint
from opal_deploy.train import checkpoints
from opal_deploy.train.run_directory import fingerprint_dataset
from tests.builders import SMALL_BACKBONE
from tests.cli.calls import check
from tests.train.fitting import fit, read_epochs, small

# stochastic depth draws from torch's generator: a state that is not restored changes the weights
OPTIONS = small(backbone=SMALL_BACKBONE, epochs=2, batch_size=8, lr=1e-3, size=32)


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


def outcome(out):
    """Everything that must not depend on interruptions: digests of the weights, metrics, the epochs' losses."""
    known = {}
    for name in ("best.pt", "last.pt"):
        stored = checkpoint.load(out / name)
        state = stored.network.state_dict()
        known[name] = {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in state.items()}
        known[f"{name} metrics"] = stored.metrics
    rows = read_epochs(out)
    known["epochs"] = [(row.train_loss, row.train_accuracy, row.val_loss, row.val_accuracy) for row in rows]
    return known


def interrupted(squares, out, options=OPTIONS, *, after=1, **changes):
    """Return the folder of a run that ended after an epoch."""

    def interrupt(line):
        if line.startswith(f"epoch {after}/"):
            raise Killed

    with pytest.raises(Killed):
        fit(squares, options, out, log=interrupt, **changes)
    return out


@pytest.fixture(scope="module")
def whole(squares, tmp_path_factory):
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    fit(squares, OPTIONS, out)
    return out


@pytest.fixture(scope="module")
def _ended(squares, tmp_path_factory):
    return interrupted(squares, tmp_path_factory.mktemp("ended") / "run")


@pytest.fixture
def ended(_ended, tmp_path):
    """A run that ended after its first epoch, in a copy."""
    return Path(shutil.copytree(_ended, tmp_path / "run"))


# the first best.pt, the first and second last.pt, best.pt of the whole run
@pytest.mark.parametrize("write", [1, 2, 3, 4])
def test_ending_before_any_write_and_resuming_ends_bit_identical(squares, whole, tmp_path, monkeypatch, write):
    done, save, run = 0, checkpoints.save, tmp_path / "run"

    def save_or_die(*arguments, **options):
        nonlocal done
        done += 1
        if done == write:
            raise Killed
        save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", save_or_die)
        with pytest.raises(Killed):
            fit(squares, OPTIONS, run, resume=True)
    torch.manual_seed(99)  # another process draws from another state
    result = fit(squares, OPTIONS, run, resume=True)
    assert outcome(run) == outcome(whole)
    assert result.best_epoch == checkpoint.load(whole / "best.pt").metrics["epoch"]
    assert (run / "summary.json").exists()


def test_a_schedule_and_every_term_of_the_loss_go_on_from_where_they_were(squares, tmp_path):
    options = replace(OPTIONS, schedule="cosine", adversarial=0.5, stride=8, keep_layers=True)
    fewer = replace(squares, train=squares.train[:8], val=squares.val[:4], test=[])
    fit(fewer, options, tmp_path / "whole")
    interrupted(fewer, tmp_path / "run", options)
    torch.manual_seed(99)
    fit(fewer, options, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_resuming_a_finished_run_gives_its_result(squares, whole):
    before = outcome(whole)
    result = fit(squares, OPTIONS, whole, resume=True)
    assert outcome(whole) == before
    assert result.test.accuracy == json.loads((whole / "summary.json").read_text())["test_accuracy"]
    assert [record.epoch for record in result.epochs] == [1, 2]


def test_more_epochs_may_be_asked_for(squares, whole, tmp_path):
    fit(squares, replace(OPTIONS, epochs=1), tmp_path / "run")
    interrupted(squares, tmp_path / "run", after=2, resume=True)
    assert not (tmp_path / "run" / "summary.json").exists()
    fit(squares, OPTIONS, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(whole)


def test_another_run_is_refused_with_what_differs(squares, whole):
    for data, options, message in (
        (squares, {"lr": 2e-3}, r"lr was 0\.001 and is 0\.002"),
        (replace(squares, train=squares.train[1:]), {}, "the training images"),
        (squares, {"epochs": 1}, "2 epochs are done"),
    ):
        with pytest.raises(UsageError, match=message):
            fit(data, replace(OPTIONS, **options), whole, resume=True)


def test_fewer_test_images_cost_a_warning_and_no_epoch(squares, whole, ended):
    lines = []
    result = fit(replace(squares, test=squares.test[1:]), OPTIONS, ended, resume=True, log=lines.append)
    assert "warning: validation or test images have changed since epochs were measured on them" in lines
    assert outcome(ended)["epochs"] == outcome(whole)["epochs"]
    assert result.test.images == len(squares.test) - 1


def test_an_image_of_the_same_size_is_another(tmp_path):
    image = tmp_path / "a.png"
    data = DataSet(tmp_path, "any", ["a", "b"], [Sample(image, 0)], [], [])
    image.write_bytes(b"x" * 9000)
    before = fingerprint_dataset(data)
    image.write_bytes(b"x" * 8999 + b"y")
    assert [fingerprint_dataset(data)[part] == before[part] for part in ("train", "measured")] == [False, True]


def test_a_full_disk_leaves_the_checkpoint_before_and_can_be_resumed(squares, whole, tmp_path):
    out, kept = tmp_path / "run", []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill_the_disk(line):
        if line.startswith("epoch 1"):
            kept.append((out / "last.pt").read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept[0]) // 3, before[1]))

    try:
        with pytest.raises(StoppedEarly, match="make room"):
            fit(squares, OPTIONS, out, log=fill_the_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (out / "last.pt").read_bytes() == kept[0]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    fit(squares, OPTIONS, out, resume=True)
    assert outcome(out) == outcome(whole)


@pytest.mark.parametrize("damage", [{"random": []}, {"optimizer": {}}, {"progress": {"epoch": 1}}], ids=str)
def test_a_damaged_state_is_one_line(squares, ended, damage):
    raw = torch.load(ended / "last.pt", weights_only=True)
    torch.save({**raw, "resume": {**raw["resume"], **damage}}, ended / "last.pt")
    with pytest.raises(UsageError, match="damaged"):
        fit(squares, OPTIONS, ended, resume=True)


def test_a_second_process_in_the_same_folder_is_refused(squares, tmp_path):
    refused = []

    def meanwhile(line):
        if line.startswith("epoch"):
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(UsageError, match="another process"):
                    fit(squares, OPTIONS, tmp_path, **options)
                refused.append(options)

    fit(squares, replace(OPTIONS, epochs=1), tmp_path, log=meanwhile)
    assert len(refused) == 2
    assert not (tmp_path / ".lock").exists()


def test_kill_9_and_resume_from_the_command_line(opal, squares, tmp_path):
    def arguments(out):
        return [
            "train", squares.root, "--out", out, "--resume", "--weights", "none", "--backbone", OPTIONS.backbone,
            "--epochs", 2, "--batch-size", OPTIONS.batch_size, "--lr", 1e-3, "--size", 32, "--prototypes", 2,
            "--device", "cpu", "--workers", 0,
        ]  # fmt: skip

    command = [sys.executable, "-m", "opal_deploy", *map(str, arguments(tmp_path / "run"))]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run/last.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    # uninterrupted, and resumed
    for out in ("whole", "run"):
        check(opal(*arguments(tmp_path / out)))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
