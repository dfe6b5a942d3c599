"""best.pt and last.pt of a run: writing them, and resuming from last.pt."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from opal_deploy.artifact.files import write_json
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.logs import Progress
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.state_dicts import load_torch_file
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.train import machine
from opal_deploy.train.images import Loaders
from opal_deploy.train.measure import Measurements, measure_network
from opal_deploy.train.run_directory import (
    RESUME_ADVICE,
    EpochRecord,
    TrainResult,
    TrainRunDirectory,
    describe_differences,
    stop_when_full,
)

# the key in last.pt next to the checkpoint's own
RESUME_KEY = "resume"


@dataclass
class TrainState:
    """The progress of a run after an epoch.

    Attributes:
        epoch: number of finished epochs.
        records: one per finished epoch.
        best: epoch and validation metrics of the best weights so far.
        planned_epochs: the number of epochs that `--minutes` leaves time for; None without it.
        checkpoint_metrics: the metrics that last.pt carries.
        best_weights: the best weights so far, on the CPU.
    """

    epoch: int = 0
    records: list[EpochRecord] = field(default_factory=list)
    best: tuple[int, Evaluation] | None = None
    planned_epochs: int | None = None
    checkpoint_metrics: dict[str, Any] = field(default_factory=dict)
    best_weights: dict[str, Tensor] | None = None

    @property
    def best_epoch(self) -> int | None:
        """The epoch of the best weights so far; None before the first one."""
        return None if self.best is None else self.best[0]


def copy_weights(network: OpalNetwork) -> dict[str, Tensor]:
    """Return a network's state as contiguous copies on the CPU."""
    state = network.state_dict()
    return {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in state.items()}


@dataclass
class RunWriter:
    """Writes the checkpoints of a run; every process calls it, and the first one writes.

    Checkpoints carry `config`, the content of config.json.
    """

    run_dir: TrainRunDirectory
    data: DataSet
    network: OpalNetwork
    loaders: Loaders
    background: list[Sample]
    config: dict[str, Any]
    edits: tuple[dict[str, Any], ...]
    fabric: Fabric
    progress: Progress
    # epoch and measurements of the weights in best.pt
    measured: tuple[int, Measurements] | None = None

    def write_best(self, state: TrainState) -> Measurements:
        """Measure the best weights so far, then write best.pt; leaves them in the network."""
        assert state.best is not None  # called after an epoch
        epoch, network = state.best[0], self.network
        if self.measured is None or self.measured[0] != epoch:
            network.load_state_dict(state.best_weights or {})
            with machine.unchanged_random_state(self.fabric.device):
                measured = measure_network(
                    network, self.data, self.loaders, self.background, self.fabric, self.progress
                )
            machine.set_tf32(self.config["options"]["tf32"])
            self.measured = epoch, measured
        measured = self.measured[1]
        network.neighbours = measured.neighbours
        self._save(
            self.run_dir.best, {"epoch": epoch, **measured.metrics}, {"state_dict": state.best_weights},
            receptive_field=measured.receptive_field, calibration=measured.calibration, baseline=measured.baseline,
        )  # fmt: skip
        network.neighbours = None
        return measured

    def write_last(self, state: TrainState, optimizer: Any) -> None:
        """Write last.pt with everything that the next epoch depends on, then metrics.csv."""
        resume = {
            "progress": asdict(replace(state, best_weights=None)),
            "optimizer": optimizer.state_dict(),
            "scaler": self.fabric.strategy.precision.state_dict(),
            # every process draws random numbers of its own
            "random": machine.gather(self.fabric, machine.get_random_state(self.fabric.device)),
            "best_weights": None if state.best_epoch == state.epoch else state.best_weights,
        }
        weights = copy_weights(self.network)
        self._save(self.run_dir.last, state.checkpoint_metrics, {"state_dict": weights, RESUME_KEY: resume})
        if self.fabric.is_global_zero:
            with stop_when_full():
                self.run_dir.write_epochs(state.records)

    def finish(self, state: TrainState) -> TrainResult:
        """Measure the best weights, and write best.pt and summary.json."""
        run_dir, records, measured = self.run_dir, state.records, self.write_best(state)
        assert state.best is not None
        if self.fabric.is_global_zero:
            summary = {
                "epoch": state.best[0],
                **measured.metrics,
                "calibration": measured.calibration.to_dict(),
                "classes": [asdict(counts) for counts in measured.classes],
                "linear_accuracy": self.config.get("linear_accuracy"),
                "epochs": state.epoch,
                "seconds": sum(record.seconds for record in records),
                "images_per_second": records[-1].images_per_second,
            }
            with stop_when_full():
                write_json(run_dir.summary, summary)
        self.fabric.barrier()
        return TrainResult(
            run_dir.best, state.best[0], records, measured.val, measured.test, measured.calibration, run_dir.last,
            self.config, measured.classes, [*describe_supported_rates(measured.val.risk or {}, measured.baseline)],
        )  # fmt: skip

    def _save(self, path: Path, metrics: dict[str, Any], content: dict[str, Any], **measurements: Any) -> None:
        if self.fabric.is_global_zero:
            checkpoint = Checkpoint(
                self.network, self.data.class_names, crop=self.data.crop, metrics=metrics, training=self.config,
                edits=self.edits, **measurements,
            )  # fmt: skip
            with stop_when_full():
                save(path, checkpoint, extra=content)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a run's own checkpoint.

    Raises:
        CheckpointError: the file is damaged, or not a checkpoint of this trainer.
    """
    try:
        raw = load_torch_file(path)
    except CheckpointError:
        raw = None
    if not isinstance(raw, dict) or not {"state_dict", "training", "metrics"} <= raw.keys():
        raise CheckpointError(f"{path}: damaged, or not a checkpoint of this trainer; {RESUME_ADVICE}")
    return raw


def restore(
    path: Path, last: dict[str, Any], config: dict[str, Any], network: OpalNetwork, optimizer: Any, fabric: Fabric
) -> TrainState:
    """Put network, optimizer, scaler and generators into the state of last.pt; return the progress.

    Args:
        path: of last.pt.
        last: its content.
        config: the configuration of the run to go on with, see `describe_differences`.
        network: changed in place, as are `optimizer` and torch's generators.
        optimizer: wrapped by Fabric.
        fabric: the processes of the run.

    Raises:
        CheckpointError: the state is damaged.
        UsageError: last.pt is of another run, or more epochs are done than asked for.
    """
    if differences := describe_differences(last["training"], config):
        raise UsageError(f"{path.parent}: holds another run: {'; '.join(differences)}; {RESUME_ADVICE}")
    try:
        raw = last[RESUME_KEY]
        progress = {field.name: raw["progress"][field.name] for field in fields(TrainState)}
        state = TrainState(**progress)
        state.records = [EpochRecord(**record) for record in progress["records"]]
        epoch, evaluation = progress["best"]
        state.best = epoch, Evaluation(**evaluation)
        state.best_weights = last["state_dict"] if epoch == state.epoch else raw["best_weights"]
        network.load_state_dict(last["state_dict"])
        optimizer.load_state_dict(raw["optimizer"])
        if raw["scaler"]:
            fabric.strategy.precision.load_state_dict(raw["scaler"])
        # last, because building a network draws from the same generator
        machine.set_random_state(raw["random"][fabric.global_rank], fabric.device)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise CheckpointError(f"{path}: its training state is damaged ({reason}); {RESUME_ADVICE}") from None
    if state.epoch > config["options"]["epochs"]:
        raise UsageError(
            f"{path}: {state.epoch} epochs are done; give --epochs {state.epoch} or more, or another --out"
        )
    return state
