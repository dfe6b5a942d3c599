"""Resuming a run: its stored configuration and state, compared with the run to continue."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import torch

from opal_deploy.artifact.files import read_json, without_folders
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.checkpoints import RESUME_ADVICE, RESUME_KEY, TrainState, load_run_file
from opal_deploy.train.checks import read_keep_off
from opal_deploy.train.epoch import TrainStep
from opal_deploy.train.machine import ProcessGroup
from opal_deploy.train.recipe import CHANGEABLE_ON_RESUME, OUTSIDE, TrainOptions
from opal_deploy.train.run_directory import TrainRunDirectory


def parse_evaluation(metrics: dict[str, Any], split: str) -> Evaluation:
    """Return the evaluation that `Evaluation.to_dict(split)` wrote into the metrics of a checkpoint."""
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
        epochs: total number of epochs.

    Raises:
        CheckpointError: the state is damaged.
        UsageError: last.pt has no state, more than `epochs` epochs are done, or best.pt is of another run.
    """
    if RESUME_KEY not in last:
        raise UsageError(
            f"{run_dir.last}: holds no training state, so the run cannot be continued; "
            "give another --out, or --overwrite"
        )
    try:
        state = last[RESUME_KEY]
        progress = TrainState.from_dict(state["progress"])
        network.load_state_dict(last["state_dict"])
        train_step.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:
            train_step.scaler.load_state_dict(state["scaler"])
        if len(state["random"]) != group.size or "cpu" not in state["random"][group.rank]:
            raise ValueError("random state of other processes")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{run_dir.last}: its training state is damaged ({type(error).__name__}: {reason}); "
            "give another --out, or --overwrite"
        ) from None
    if progress.epoch > epochs:
        raise UsageError(
            f"{run_dir.root}: {progress.epoch} epochs are done, but --epochs is {epochs}; "
            f"give --epochs {progress.epoch} or more, or another --out"
        )
    best_metrics = load_run_file(run_dir.best)["metrics"] if run_dir.best.is_file() else {}
    if best_metrics.get("epoch") == progress.epoch + 1:
        # killed between best.pt and last.pt: the epoch is repeated, but its weights have replaced the previous best
        progress.best = (progress.epoch + 1, parse_evaluation(best_metrics, "val"))
    elif progress.best is not None and best_metrics.get("epoch") != progress.best[0]:
        raise UsageError(
            f"{run_dir.best}: not the checkpoint of epoch {progress.best[0]}, the best of this run; "
            "put it back, or start again with --overwrite"
        )
    # last, because building a network draws from the same generator
    random = state["random"][group.rank]
    torch.set_rng_state(random["cpu"])
    if group.device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], group.device)
    return progress


def check_same_run(run_dir: TrainRunDirectory, last: dict[str, Any] | None, run_config: dict[str, Any]) -> None:
    """Raise UsageError with the differences between the stored configuration of a run and the one to resume it with.

    Args:
        run_dir: the run's directory.
        last: content of last.pt, whose configuration takes precedence over config.json's.
        run_config: `options`, `fingerprint`, `processes` and `precision`, or some of them.
    """
    stored = read_config(run_dir) if last is None else last["training"]
    if stored is None:
        return
    differences = describe_differences(stored, run_config)
    if differences:
        raise UsageError(f"{run_dir.root}: holds another run: {'; '.join(differences)}; {RESUME_ADVICE}")


def describe_differences(
    stored: Any, run_config: dict[str, Any], ignored: tuple[str, ...] = CHANGEABLE_ON_RESUME
) -> list[str]:
    """Return a clause for each difference between two configurations, except for the options in `ignored`."""
    if not isinstance(stored, dict) or not isinstance(stored.get("options"), dict):
        return ["its configuration cannot be read"]
    stored, run_config, defaults = json.loads(json.dumps([stored, run_config, asdict(TrainOptions())]))
    # earlier versions stored whole paths
    stored["options"], run_config["options"] = without_folders([stored["options"], run_config["options"]])
    # an option that an earlier version did not have was at its default
    old, new = {**defaults, **stored["options"]}, run_config["options"]
    # an earlier version did not store those that it had planned with the options
    old |= {name: stored.get(name) for name in ("epochs", "batch_size") if old[name] is None}
    # a stored run knows what `auto` stood for; for the new run it is compared below, or not known yet
    old["precision"] = stored.get("precision", old.get("precision"))
    if "precision" in run_config or new.get("precision") == "auto":
        ignored = (*ignored, "precision")
    if new.get("schedule") == "cosine":
        # its learning rates depend on the number of epochs
        ignored = tuple(key for key in ignored if key != "epochs")
    keys = [key for key in {**old, **new} if key not in ignored and old.get(key) != new.get(key)]
    clauses = [f"{key} was {_shorten(old.get(key))} and is {_shorten(new.get(key))}" for key in keys]
    others = {
        "fingerprint": "the images, labels, boxes, splits or regions of the data set have changed",
        "processes": f"processes was {stored.get('processes')} and is {run_config.get('processes')}",
        "start": "the checkpoint of --start-from has changed",
        "precision": f"precision was {stored.get('precision')} and is {run_config.get('precision')}",
    }
    clauses += [text for key, text in others.items() if key in run_config and stored.get(key) != run_config[key]]
    return clauses


def read_config(run_dir: TrainRunDirectory) -> dict[str, Any] | None:
    """Return the content of config.json; None without such a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        config = read_json(run_dir.config)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run_dir.config}: not readable ({error}); {RESUME_ADVICE}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{run_dir.config}: not the configuration of a run; {RESUME_ADVICE}")
    return config


def fingerprint_dataset(data: DataSet, keep_off: str | None = None) -> str:
    """Return the sha256 over every image's path under the root, size in bytes, label and box, split by split.

    It includes the file of kept-off regions, if there is one.

    Raises:
        UsageError: an image or the file no longer exists.
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
    if keep_off is not None and keep_off != OUTSIDE:
        digest.update(read_keep_off(keep_off))
    return digest.hexdigest()


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
