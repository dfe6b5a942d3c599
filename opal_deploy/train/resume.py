"""The resume state in last.pt: everything beside the network that the next step depends on.

The state is in one file, written atomically, so that a run killed at any moment leaves the state of one moment. Order
and augmentation of the images depend on seed, epoch and position alone (see `images`) and need no state.
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
from opal_deploy.train.recipe import CHANGEABLE_ON_RESUME, TrainOptions
from opal_deploy.train.run_directory import EpochRecord, TrainRunDirectory
from opal_deploy.train.validation import Evaluation

# the key in last.pt beside the checkpoint's own
RESUME_KEY = "resume"
_ADVICE = "give --resume with the options that it was begun with, another --out, or --overwrite"


@dataclass
class TrainState:
    """The progress of a run.

    Attributes:
        epoch: number of finished epochs.
        step: number of steps done of the epoch after them.
        epoch_metrics: running totals of that epoch.
        records: one per finished epoch.
        best: epoch and validation metrics of the lowest validation loss so far.
        checkpoint_metrics: the metrics that last.pt carries.
    """

    epoch: int = 0
    step: int = 0
    epoch_metrics: EpochMetrics = field(default_factory=EpochMetrics)
    records: list[EpochRecord] = field(default_factory=list)
    best: tuple[int, Evaluation] | None = None
    checkpoint_metrics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_dict` reads."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "sums": asdict(self.epoch_metrics),
            "records": [asdict(record) for record in self.records],
            "best": None if self.best is None else [self.best[0], asdict(self.best[1])],
            "figures": self.checkpoint_metrics,
        }

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> TrainState:
        """Return the progress that `to_dict` wrote."""
        best = raw["best"]
        return TrainState(
            raw["epoch"],
            raw["step"],
            EpochMetrics(**raw["sums"]),
            [EpochRecord(**record) for record in raw["records"]],
            None if best is None else (best[0], Evaluation(**best[1])),
            raw["figures"],
        )


def parse_evaluation(metrics: dict[str, Any], split: str) -> Evaluation:
    """Return the evaluation that `Evaluation.to_dict(split)` wrote into a checkpoint's metrics."""
    values = {name.removeprefix(f"{split}_"): value for name, value in metrics.items()}
    return Evaluation(**{field.name: values[field.name] for field in fields(Evaluation) if field.name in values})


def restore_run(
    run_dir: TrainRunDirectory,
    last: dict[str, Any],
    network: OpalNetwork,
    train_step: TrainStep,
    group: ProcessGroup,
    epochs: int,
) -> TrainState:
    """Put network, optimizer, scaler and random generators into the state of last.pt.

    Args:
        run_dir: the run's directory, whose best.pt must belong to the state.
        last: content of last.pt.
        network, train_step: changed in place.
        group: the processes of the run.
        epochs: the number of epochs to train in all.

    Raises:
        CheckpointError: the state is damaged.
        UsageError: there is no state, more epochs are done than `epochs`, or best.pt is of another run.
    """
    if RESUME_KEY not in last:
        raise UsageError(
            f"{run_dir.last}: it holds no training state, so the run cannot be continued; "
            "give another --out, or --overwrite"
        )
    try:
        progress = _restore_state(last, network, train_step, group)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{run_dir.last}: its training state is damaged ({type(error).__name__}: {reason}); "
            "give another --out, or --overwrite"
        ) from None
    if progress.epoch > epochs:
        raise UsageError(
            f"{run_dir.root}: {progress.epoch} epochs are done, and {epochs} were asked for; "
            "give --epochs at least as many, or another --out"
        )
    best_metrics = load_run_file(run_dir.best)["metrics"] if run_dir.best.is_file() else {}
    if best_metrics.get("epoch") == progress.epoch + 1:
        # killed between best.pt and last.pt: the epoch is repeated, but its weights have replaced the best before
        progress.best = (progress.epoch + 1, parse_evaluation(best_metrics, "val"))
    elif progress.best is not None and best_metrics.get("epoch") != progress.best[0]:
        raise UsageError(
            f"{run_dir.best}: it is not the checkpoint of epoch {progress.best[0]}, the best of this run; "
            "put it back, or begin again with --overwrite"
        )
    # last of all, because building a network draws from the same generator
    _set_random_state(last[RESUME_KEY]["random"][group.rank], group.device)
    return progress


def _restore_state(
    last: dict[str, Any], network: OpalNetwork, train_step: TrainStep, group: ProcessGroup
) -> TrainState:
    """Restore everything but the random generators; any exception means that the state is damaged."""
    state = last[RESUME_KEY]
    progress = TrainState.from_dict(state["progress"])
    network.load_state_dict(last["state_dict"])
    train_step.optimizer.load_state_dict(state["optimizer"])
    if state["scaler"]:
        train_step.scaler.load_state_dict(state["scaler"])
    if len(state["random"]) != group.size or "cpu" not in state["random"][group.rank]:
        raise ValueError("random state of other processes")
    return progress


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's torch generators, which stochastic depth and dropout draw from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def load_run_file(path: Path) -> dict[str, Any]:
    """Return the content of a run's own checkpoint.

    Raises:
        CheckpointError: the file is damaged, or not a checkpoint of this trainer.
    """
    try:
        raw = load_torch_file(path)
    except CheckpointError:
        raise CheckpointError(f"{path}: damaged, so the run cannot be continued; {_ADVICE}") from None
    if not isinstance(raw, dict) or not {"state_dict", "training", "metrics"} <= raw.keys():
        raise CheckpointError(f"{path}: not a checkpoint of this trainer's; {_ADVICE}")
    return raw


def check_same_run(run_dir: TrainRunDirectory, last: dict[str, Any] | None, run_config: dict[str, Any]) -> None:
    """Compare the stored configuration of a run with the one to resume it with.

    Args:
        run_dir: the run's directory.
        last: content of last.pt, whose configuration counts; without it config.json's does.
        run_config: `options`, `fingerprint`, `processes` and `precision`, or some of them.

    Raises:
        UsageError: names the differences.
    """
    stored = read_config(run_dir) if last is None else last["training"]
    if stored is None:
        return
    differences = describe_differences(stored, run_config)
    if differences:
        raise UsageError(f"{run_dir.root}: it holds another run: {'; '.join(differences)}; {_ADVICE}")


def complete_options(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a stored run, with the defaults of those that came after its version: it ran with them."""
    defaults = json.loads(json.dumps(asdict(TrainOptions())))
    return {**defaults, **stored, "head": {**defaults["head"], **stored.get("head", {})}}


def describe_differences(
    stored: Any, run_config: dict[str, Any], ignored: tuple[str, ...] = CHANGEABLE_ON_RESUME
) -> list[str]:
    """Return a clause for each difference between two configurations, without the options that are `ignored`."""
    if not isinstance(stored, dict) or not isinstance(stored.get("options"), dict):
        return ["its record cannot be read"]
    stored, run_config = json.loads(json.dumps([stored, run_config]))
    old, new = complete_options(stored["options"]), run_config["options"]
    # of a stored run it is known what `auto` stood for; of the new one it is compared below, or not known yet
    old["precision"] = stored.get("precision", old["precision"])
    if "precision" in run_config or new.get("precision") == "auto":
        ignored = (*ignored, "precision")
    if new.get("schedule") == "cosine":
        # its learning rates depend on the number of epochs
        ignored = tuple(key for key in ignored if key != "epochs")
    keys = [key for key in {**old, **new} if key not in ignored and old.get(key) != new.get(key)]
    clauses = [f"{key} was {_shorten(old.get(key))} and is {_shorten(new.get(key))}" for key in keys]
    others = {
        "fingerprint": "the images, labels, boxes or splits of the data set are others",
        "processes": f"{stored.get('processes')} processes were running and now are {run_config.get('processes')}",
        "precision": f"it computed in {stored.get('precision')} and now would in {run_config.get('precision')}",
    }
    clauses += [text for key, text in others.items() if key in run_config and stored.get(key) != run_config[key]]
    return clauses


def read_config(run_dir: TrainRunDirectory) -> dict[str, Any] | None:
    """Return the content of config.json, or None where there is no such file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        config = json.loads(run_dir.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run_dir.config}: not readable ({error}); {_ADVICE}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{run_dir.config}: not the record of a run; {_ADVICE}")
    return config


def fingerprint_dataset(data: DataSet) -> str:
    """Return the sha256 over every image's path under the root, size in bytes, label and box, split by split.

    Raises:
        UsageError: an image has vanished.
    """
    digest = hashlib.sha256(json.dumps(data.class_names).encode())
    for split in (data.train, data.val, data.test):
        for sample in split:
            is_below = sample.path.is_relative_to(data.root)
            name = sample.path.relative_to(data.root).as_posix() if is_below else sample.path.name
            try:
                size = sample.path.stat().st_size
            except OSError as error:
                raise UsageError(f"{sample.path}: cannot be read ({error.strerror}); put it back") from None
            digest.update(json.dumps([name, size, sample.label, sample.box]).encode())
        digest.update(b"|")
    return digest.hexdigest()


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
