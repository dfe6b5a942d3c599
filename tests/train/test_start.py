"""`train --start-from`: a new run with another one's backbone and head."""

from dataclasses import replace

import pytest
import torch

from opal_deploy.editing.api import edit_model
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint
from tests.builders import SMALL_BACKBONE
from tests.train.fitting import fit, small

OPTIONS = small(backbone=SMALL_BACKBONE, epochs=1, batch_size=8, lr=1e-3, size=32, precision="fp32")
DROPPED = 3  # the channel of green/1


@pytest.fixture(scope="module")
def runs(squares, tmp_path_factory):
    """A run in `runs/first`, and its checkpoint without green/1, `edited.pt`."""
    folder = tmp_path_factory.mktemp("start")
    fit(squares, OPTIONS, folder / "first")
    edit_model(folder / "first" / "best.pt", drop=["green/1"], reason="a stamp", out=folder / "edited.pt", log=print)
    return folder


def test_all_layers_go_on_and_dropped_slots_stay_dropped(squares, runs, tmp_path, opal):
    edited = checkpoint.load(runs / "edited.pt")
    options = replace(OPTIONS, start_from=str(runs / "edited.pt"))
    result = checkpoint.load(fit(squares, options, tmp_path / "run").last)
    before, after = edited.network.state_dict(), result.network.state_dict()
    assert {key.partition(".")[0] for key in before if not torch.equal(before[key], after[key])} == {"backbone", "head"}
    assert result.network.config.head.dropped == (DROPPED,)
    assert result.edits == edited.edits
    shown = opal("inspect", tmp_path / "run" / "best.pt").stdout
    assert f"started from  edited.pt, sha256 {edited.source['sha256'][:16]}" in shown
    assert "a stamp" in shown


def test_a_run_is_resumed_only_from_the_same_start(squares, runs, tmp_path):
    path = tmp_path / "start.pt"
    path.write_bytes((runs / "edited.pt").read_bytes())
    options = replace(OPTIONS, start_from=str(path))
    done = fit(squares, options, tmp_path / "run")
    again = fit(squares, options, tmp_path / "run", resume=True)
    assert again.val == done.val
    edit_model(runs / "first" / "best.pt", drop=["red/1"], out=path, overwrite=True, log=print)
    with pytest.raises(UsageError, match="start-from"):
        fit(squares, options, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_from": "nowhere.pt"}, "no such checkpoint"),
        ({"prototypes": 3}, "prototypes_per_class is 2 there and 3"),
        ({"backbone": "resnet18"}, f"backbone is {SMALL_BACKBONE}"),
    ],
    ids=str,
)
def test_another_network_is_refused(squares, runs, tmp_path, changes, message):
    options = replace(OPTIONS, **{"start_from": str(runs / "edited.pt"), **changes})
    with pytest.raises(UsageError, match=message):
        fit(squares, options, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_classes_are_refused(squares, runs, tmp_path):
    other = replace(squares, class_names=["blue", "green", "rot"])
    with pytest.raises(UsageError, match="rot"):
        fit(other, replace(OPTIONS, start_from=str(runs / "edited.pt")), tmp_path / "run")
