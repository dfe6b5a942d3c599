"""What last.pt holds beside the network while a run is under way: everything that the next step depends on.

It is one file, written under another name and renamed, so a run that is killed at any moment leaves the state of one
moment. Order and augmentation of the pictures depend on seed, epoch and position alone (see `pictures`), so they need
no state of their own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model.backbones import load_torch_file
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.distributed import ProcessGroup
from opal_deploy.train.epoch import EpochMetrics, TrainStep
from opal_deploy.train.recipe import CHANGEABLE_ON_RESUME
from opal_deploy.train.run_directory import EpochRecord, TrainRunDirectory
from opal_deploy.train.validation import Evaluation

# the key beside the checkpoint's own
RESUME_KEY = "resume"
_ADVICE = "give --resume with the options that it was begun with, another --out, or --overwrite"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        epoch: epochs that are finished.
        step: steps done of the epoch after them.
        sums: of that epoch.
        records: one an epoch that is finished.
        best: epoch and validation figures of the lowest validation loss up to now.
        figures: what last.pt says of itself.
    """

    epoch: int = 0
    step: int = 0
    sums: EpochMetrics = field(default_factory=EpochMetrics)
    records: list[EpochRecord] = field(default_factory=list)
    best: tuple[int, Evaluation] | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which `from_dict` reads back."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "sums": asdict(self.sums),
            "records": [asdict(record) for record in self.records],
            "best": None if self.best is None else [self.best[0], asdict(self.best[1])],
            "figures": self.figures,
        }

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> Progress:
        """The inverse of `to_dict`."""
        best = raw["best"]
        return Progress(
            raw["epoch"],
            raw["step"],
            EpochMetrics(**raw["sums"]),
            [EpochRecord(**record) for record in raw["records"]],
            None if best is None else (best[0], Evaluation(**best[1])),
            raw["figures"],
        )


def parse_evaluation(figures: dict[str, Any], split: str) -> Evaluation:
    """The inverse of `Evaluation.to_dict`, for what a checkpoint's metrics hold."""
    own = {name.removeprefix(f"{split}_"): value for name, value in figures.items()}
    return Evaluation(**{field.name: own[field.name] for field in fields(Evaluation) if field.name in own})


def restore_state(last: dict[str, Any], network: OpalNetwork, learner: TrainStep, group: ProcessGroup) -> Progress:
    """Put everything but the random state back as `last` has it; any exception means that it is damaged."""
    stored = last[RESUME_KEY]
    progress = Progress.from_dict(stored["progress"])
    network.load_state_dict(last["state_dict"])
    learner.optimizer.load_state_dict(stored["optimizer"])
    if stored["scaler"]:
        learner.scaler.load_state_dict(stored["scaler"])
    if len(stored["random"]) != group.size or "cpu" not in stored["random"][group.rank]:
        raise ValueError("random state of other processes")
    return progress


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Of torch's generators in this process: stochastic depth and dropout draw from them."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def load_run_file(path: Path) -> dict[str, Any]:
    """A checkpoint of the run's own as it is stored.

    Raises:
        CheckpointError: damaged, or not one.
    """
    try:
        raw = load_torch_file(path)
    except CheckpointError:
        raise CheckpointError(f"{path}: damaged, so the run cannot be continued; {_ADVICE}") from None
    if not isinstance(raw, dict) or not {"state_dict", "training", "metrics"} <= raw.keys():
        raise CheckpointError(f"{path}: not a checkpoint of this trainer's; {_ADVICE}")
    return raw


def check_same_run(folder: TrainRunDirectory, last: dict[str, Any] | None, wanted: dict[str, Any]) -> None:
    """Compare what a run was started with with what it is to be continued with.

    Args:
        last: last.pt, which is what counts; without one, config.json does.
        wanted: `options`, `fingerprint`, `processes` and `precision`.

    Raises:
        UsageError: names what differs.
    """
    stored = read_config(folder) if last is None else last["training"]
    if stored is None:
        return
    differences = describe_differences(stored, wanted)
    if differences:
        raise UsageError(f"{folder.root}: it holds another run: {'; '.join(differences)}; {_ADVICE}")


def describe_differences(
    stored: Any, wanted: dict[str, Any], free: tuple[str, ...] = CHANGEABLE_ON_RESUME
) -> list[str]:
    """In words, what is not the same in two runs, options that are `free` left out."""
    if not isinstance(stored, dict) or not isinstance(stored.get("options"), dict):
        return ["its record cannot be read"]
    stored, wanted = json.loads(json.dumps([stored, wanted]))
    old, new = stored["options"], wanted["options"]
    keys = [key for key in {**old, **new} if key not in free and old.get(key) != new.get(key)]
    words = [f"{key} was {_short(old.get(key))} and is {_short(new.get(key))}" for key in keys]
    others = {
        "fingerprint": "the pictures, labels, boxes or splits of the data set are others",
        "processes": f"{stored.get('processes')} processes were running and now are {wanted.get('processes')}",
        "precision": f"it computed in {stored.get('precision')} and now would in {wanted.get('precision')}",
    }
    words += [text for key, text in others.items() if key in wanted and stored.get(key) != wanted[key]]
    return words


def read_config(folder: TrainRunDirectory) -> dict[str, Any] | None:
    """config.json; None where there is none.

    Raises:
        CheckpointError: damaged.
    """
    try:
        found = json.loads(folder.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder.config}: not readable ({error}); {_ADVICE}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder.config}: not the record of a run; {_ADVICE}")
    return found


def fingerprint_dataset(data: DataSet) -> str:
    """sha256 over every picture's path under the root, size in bytes, label and box, split by split.

    Raises:
        UsageError: a picture has vanished.
    """
    digest = hashlib.sha256(json.dumps(data.class_names).encode())
    for split in (data.train, data.val, data.test):
        for sample in split:
            name = _relative(sample.path, data.root)
            try:
                size = sample.path.stat().st_size
            except OSError as error:
                raise UsageError(f"{sample.path}: cannot be read ({error.strerror}); put it back") from None
            digest.update(json.dumps([name, size, sample.label, sample.box]).encode())
        digest.update(b"|")
    return digest.hexdigest()


def _relative(path: Path, root: Path) -> str:
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return path.name


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
