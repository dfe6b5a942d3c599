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
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.model import checkpoint
from opal_deploy.model.config import HeadConfig
from opal_deploy.train import checkpoints
from opal_deploy.train.loop import fit
from opal_deploy.train.recipe import TrainOptions
from opal_deploy.train.resume import describe_differences
from opal_deploy.train.run_directory import TrainRunDirectory
from tests.builders import SMALL_BACKBONE
from tests.cli.calls import check

# stochastic depth draws from torch's generator: a state that is not restored changes the weights
OPTIONS = TrainOptions(
    backbone=SMALL_BACKBONE, epochs=2, batch_size=8, lr=1e-3, input_size=(32, 32),
    head=HeadConfig(prototypes_per_class=2), device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(squares, tmp_path_factory):
    """The uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    fit(squares, OPTIONS, out)
    return out


def _outcome(out):
    """Everything that must not depend on interruptions: digests of the weights, metrics, the epochs' losses."""
    found = {}
    for name in ("best.pt", "last.pt"):
        stored = checkpoint.load(out / name)
        state = stored.network.state_dict()
        found[name] = {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in state.items()}
        found[f"{name} metrics"] = stored.metrics
    rows = TrainRunDirectory(out).read_epochs()
    found["epochs"] = [(row.train_loss, row.train_accuracy, row.val_loss, row.val_accuracy) for row in rows]
    return found


class _Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


def test_another_versions_plan_changes_no_run_that_goes_on():
    options = replace(OPTIONS, epochs=None, batch_size=None)
    stored = {"batch_size": 7, "epochs": 5, "options": asdict(options)}
    assert options.plan_epochs(100, stored) == (7, 5) != options.plan_epochs(100)
    settled = replace(options, batch_size=7, epochs=5)
    assert not describe_differences(stored, {"options": asdict(settled)})
    assert OPTIONS.plan_epochs(100, stored) == (OPTIONS.batch_size, OPTIONS.epochs)


def _interrupted(squares, out, options=OPTIONS):
    """A run that ended after its first epoch."""

    def interrupt(line):
        if line.startswith("epoch 1"):
            raise _Killed

    with pytest.raises(_Killed):
        fit(squares, options, out, log=interrupt)
    return out


@pytest.fixture(scope="module")
def _ended(squares, tmp_path_factory):
    return _interrupted(squares, tmp_path_factory.mktemp("ended") / "run")


@pytest.fixture
def ended(_ended, tmp_path):
    """A run that ended after its first epoch, in a copy."""
    return Path(shutil.copytree(_ended, tmp_path / "run"))


# within the first epoch, its best.pt, its last.pt, the last.pt of the second, best.pt with the test figures
@pytest.mark.parametrize("write", [1, 2, 3, 5, 6])
def test_ending_before_any_write_and_resuming_ends_bit_identical(squares, whole, tmp_path, monkeypatch, write):
    done = 0
    save = checkpoints.save

    def save_or_die(*arguments, **options):
        nonlocal done
        done += 1
        if done == write:
            raise _Killed
        save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", save_or_die)
        options = replace(OPTIONS, save_every=2)
        with pytest.raises(_Killed):
            fit(squares, options, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "summary.json").exists()
    torch.manual_seed(99)  # another process draws from another state
    result = fit(squares, options, tmp_path / "run", resume=True)
    assert _outcome(tmp_path / "run") == _outcome(whole)
    assert result.best_epoch == checkpoint.load(whole / "best.pt").metrics["epoch"]
    assert (tmp_path / "run" / "summary.json").exists()


def test_dropout_and_stochastic_depth_go_on_from_where_they_were(squares, tmp_path):
    options = replace(OPTIONS, backbone="efficientnet_b0", save_every=1, batch_size=4)
    small = replace(squares, train=squares.train[:8], val=squares.val[:4], test=[])
    fit(small, options, tmp_path / "whole")
    _interrupted(small, tmp_path / "run", options)
    torch.manual_seed(99)
    fit(small, options, tmp_path / "run", resume=True)
    assert _outcome(tmp_path / "run") == _outcome(tmp_path / "whole")


def test_a_schedule_and_two_views_go_on_bit_by_bit_and_their_epochs_are_fixed(squares, tmp_path):
    # a network whose layers can be kept
    finer = {"backbone": "shufflenet_v2_x0_5", "stride": 8, "keep_layers": True}
    options = replace(OPTIONS, schedule="cosine", agreement=0.3, adversarial=0.5, **finer)
    fit(squares, options, tmp_path / "whole")
    _interrupted(squares, tmp_path / "ended", options)
    with pytest.raises(UsageError, match="epochs was 2 and is 3"):
        fit(squares, replace(options, epochs=3), tmp_path / "ended", resume=True)
    fit(squares, options, tmp_path / "ended", resume=True)
    assert _outcome(tmp_path / "ended") == _outcome(tmp_path / "whole")


def test_resuming_a_finished_run_gives_its_result_and_touches_nothing(squares, whole):
    before = {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}
    result = fit(squares, OPTIONS, whole, resume=True)
    assert {path.name: path.stat().st_mtime_ns for path in whole.iterdir()} == before
    assert result.test is not None
    assert result.test.accuracy == json.loads((whole / "summary.json").read_text())["test_accuracy"]
    assert [record.epoch for record in result.epochs] == [1, 2]
    assert "resume" not in torch.load(whole / "last.pt", weights_only=True)


def test_a_finished_run_is_read_on_a_machine_that_would_compute_otherwise(squares, tmp_path):
    options = replace(OPTIONS, epochs=1)
    fit(squares, options, tmp_path)
    # what `auto` stands for on a CPU
    assert fit(squares, replace(options, precision="fp32"), tmp_path, resume=True).best_epoch == 1
    for name in ("best.pt", "last.pt"):
        raw = torch.load(tmp_path / name, weights_only=True)
        raw["training"] |= {"precision": "bf16", "processes": 4, "device": "cuda:0"}
        torch.save(raw, tmp_path / name)
    assert fit(squares, options, tmp_path, resume=True).best_epoch == 1
    with pytest.raises(UsageError, match='precision was "bf16" and is "fp32"; give --resume with the options'):
        fit(squares, replace(options, precision="fp32"), tmp_path, resume=True)


def test_more_epochs_may_be_asked_for_while_a_run_is_unfinished(squares, whole, tmp_path):
    _interrupted(squares, tmp_path / "run", replace(OPTIONS, epochs=1))
    fit(squares, OPTIONS, tmp_path / "run", resume=True)
    assert _outcome(tmp_path / "run") == _outcome(whole)


def test_another_run_is_refused_with_what_differs(squares, whole):
    with pytest.raises(UsageError, match=r"lr was 0\.001 and is 0\.002; give --resume with the options"):
        fit(squares, replace(OPTIONS, lr=2e-3), whole, resume=True)
    fewer = replace(squares, train=squares.train[1:])
    with pytest.raises(UsageError, match="the images, labels, boxes, splits or regions of the data set have changed"):
        fit(fewer, OPTIONS, whole, resume=True)
    with pytest.raises(UsageError, match="the run is finished after 2 epochs and cannot be extended to 5"):
        fit(squares, replace(OPTIONS, epochs=5), whole, resume=True)
    with pytest.raises(UsageError, match="give only one of them"):
        fit(squares, OPTIONS, whole, resume=True, overwrite=True)


def test_a_folder_of_checkpoints_without_state_is_refused(squares, whole, tmp_path):
    (tmp_path / "last.pt").write_bytes((whole / "last.pt").read_bytes())
    with pytest.raises(UsageError, match="holds no training state"):
        fit(squares, OPTIONS, tmp_path, resume=True)


def test_a_full_disk_leaves_the_checkpoint_before_and_can_be_resumed(squares, whole, tmp_path):
    out = tmp_path / "run"
    sizes = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill_the_disk(line):
        if line.startswith("epoch 1"):
            sizes.append((out / "last.pt").read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(sizes[0]) // 2, before[1]))

    try:
        with pytest.raises(StoppedEarly, match=r"last\.pt: cannot be written .*, .*make room") as stopped:
            fit(squares, OPTIONS, out, log=fill_the_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"best.pt holds epoch {checkpoint.load(out / 'best.pt').metrics['epoch']}, " in str(stopped.value)
    assert (out / "last.pt").read_bytes() == sizes[0]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    fit(squares, OPTIONS, out, resume=True)
    assert _outcome(out) == _outcome(whole)


def test_a_disk_that_is_full_at_once_keeps_nothing_and_says_so(squares, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise UsageError("best.pt: cannot be written (No space left on device); choose another place")

    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(StoppedEarly, match=r"\(No space left on device\); nothing was kept yet, "):
        fit(squares, OPTIONS, tmp_path / "run")


def test_the_checkpoint_counts_and_not_the_record_beside_it(squares, ended, tmp_path):
    other = _interrupted(squares, tmp_path / "other", replace(OPTIONS, seed=5))
    (ended / "last.pt").write_bytes((other / "last.pt").read_bytes())
    with pytest.raises(UsageError, match="seed was 5 and is 0"):
        fit(squares, OPTIONS, ended, resume=True)
    (other / "config.json").unlink()
    with pytest.raises(UsageError, match=r"lr was 0\.001 and is 0\.5"):
        fit(squares, replace(OPTIONS, seed=5, lr=0.5), other, resume=True)


@pytest.mark.parametrize(
    "damage",
    [{"resume": 3}, {"resume": {}}, {"random": []}, {"optimizer": {}}, {"progress": {"epoch": 1}}, {"state_dict": {}}],
    ids=str,
)
def test_a_damaged_state_is_one_line(squares, whole, tmp_path, damage):
    run = tmp_path / "run"
    run.mkdir()
    raw = torch.load(whole / "last.pt", weights_only=True)
    state = {"progress": {}, "optimizer": {}, "scaler": {}, "random": [{"cpu": torch.get_rng_state()}]}
    top = damage if "resume" in damage or "state_dict" in damage else {"resume": {**state, **damage}}
    torch.save({**raw, "resume": state, **top}, run / "last.pt")
    with pytest.raises(UsageError, match=r"last\.pt: its training state is damaged .*give another --out, or --overwr"):
        fit(squares, OPTIONS, run, resume=True)


@pytest.mark.parametrize("text", ["[]", "{", '{"options": null}'])
def test_a_damaged_record_without_a_checkpoint_is_one_line(squares, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="another --out, or --overwrite"):
        fit(squares, OPTIONS, tmp_path, resume=True)


def test_a_best_checkpoint_that_is_gone_is_found_before_training_goes_on(squares, ended):
    (ended / "best.pt").unlink()
    lines = []
    with pytest.raises(UsageError, match=r"best\.pt: not the checkpoint of epoch 1, the best of this run"):
        fit(squares, OPTIONS, ended, resume=True, log=lines.append)
    assert lines == []


def test_a_second_process_in_the_same_folder_is_refused(squares, tmp_path):
    refused = []

    def meanwhile(line):
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(UsageError, match="another process is working there"):
                fit(squares, OPTIONS, tmp_path, **options)
            refused.append(options)

    fit(squares, replace(OPTIONS, epochs=1), tmp_path, log=meanwhile)
    # once for the line on what is trained, once for the estimate of the time, once for the epoch
    assert refused == 3 * [{"resume": True}, {"overwrite": True}]
    assert not (tmp_path / ".lock").exists()


def test_what_killed_writers_left_is_taken_away(squares, ended):
    (ended / ".last.pt.abc123.part.pt").write_bytes(b"half")
    (ended / ".mine.part").write_bytes(b"not ours")
    fit(squares, OPTIONS, ended, resume=True)
    assert {path.name for path in ended.iterdir() if path.name.startswith(".")} == {".mine.part"}


def test_kill_9_and_resume_from_the_command_line(opal, squares, tmp_path):
    def arguments(out):
        return [
            "train", squares.root, "--out", out, "--resume", "--weights", "none", "--backbone", OPTIONS.backbone,
            "--epochs", 2, "--batch-size", OPTIONS.batch_size, "--lr", 1e-3, "--size", 32, "--prototypes", 2,
            "--device", "cpu", "--save-every", 1, "--workers", 0,
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
    assert _outcome(tmp_path / "run") == _outcome(tmp_path / "whole")
