"""Writing the checkpoints of a run, and resuming from last.pt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from opal_deploy.artifact.files import write_json
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.logs import Progress
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.network import OpalNetwork
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.train import machine
from opal_deploy.train.measure import Loaders, Measurements, measure_network
from opal_deploy.train.run_directory import (
    TrainResult,
    TrainRunDirectory,
    TrainState,
    check_same_run,
    read_checkpoint,
    stop_when_full,
)

# the key in last.pt next to the checkpoint's own
RESUME_KEY = "resume"


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
        assert state.best_weights is not None
        epoch, fabric = state.best[0], self.fabric
        if self.measured is None or self.measured[0] != epoch:
            self.network.load_state_dict(state.best_weights)
            with machine.unchanged_random_state(fabric.device):
                measured = measure_network(
                    self.network, self.data, self.loaders, self.background, fabric, self.progress
                )
            machine.set_tf32(self.config["options"]["tf32"])
            self.measured = epoch, measured
        measured = self.measured[1]
        if fabric.is_global_zero:
            self.network.neighbours = measured.neighbours
            self._save(
                self.run_dir.best, {"epoch": epoch, **measured.metrics}, state.best_weights,
                receptive_field=measured.receptive_field, calibration=measured.calibration, baseline=measured.baseline,
            )  # fmt: skip
            self.network.neighbours = None
        return measured

    def write_last(self, state: TrainState, optimizer: Any) -> None:
        """Write last.pt with everything that the next epoch depends on, then metrics.csv and curves.png."""
        # every process draws random numbers of its own
        random = machine.gather(self.fabric, machine.get_random_state(self.fabric.device))
        if self.fabric.is_global_zero:
            resume = {
                "progress": state.to_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": self.fabric.strategy.precision.state_dict(),
                "random": random,
                "best_weights": None if state.best and state.best[0] == state.epoch else state.best_weights,
            }
            weights = copy_weights(self.network)
            self._save(self.run_dir.last, state.checkpoint_metrics, weights, {RESUME_KEY: resume})
            self._write_epochs(state)

    def finish(self, state: TrainState) -> TrainResult:
        """Measure the best weights, write best.pt and summary.json, and remove the state from last.pt."""
        run_dir, records, measured = self.run_dir, state.records, self.write_best(state)
        assert state.best is not None
        if self.fabric.is_global_zero:
            summary = {
                "epoch": state.best[0],
                **measured.metrics,
                "calibration": measured.calibration.to_dict(),
                "classes": [asdict(counts) for counts in measured.classes],
                "linear_accuracy": self.config.get("linear_accuracy"),
                "classifier_accuracy": self.config.get("classifier_accuracy"),
                "epochs": state.epoch,
                "seconds": sum(record.seconds for record in records),
                "images_per_second": records[-1].images_per_second,
            }
            self._write_epochs(state)
            with stop_when_full():
                write_json(run_dir.summary, summary)
            self._save(run_dir.last, state.checkpoint_metrics, read_checkpoint(run_dir.last)["state_dict"])
        self.fabric.barrier()
        return TrainResult(
            run_dir.best, state.best[0], records, measured.val, measured.test, measured.calibration, run_dir.last,
            self.config, measured.classes, [*describe_supported_rates(measured.val.risk or {}, measured.baseline)],
        )  # fmt: skip

    def _write_epochs(self, state: TrainState) -> None:
        with stop_when_full():
            self.run_dir.write_epochs(state.records, augmented=self.config["options"]["augment"] != "none")

    def _save(
        self,
        path: Path,
        metrics: dict[str, Any],
        weights: dict[str, Tensor],
        extra: dict[str, Any] | None = None,
        **measurements: Any,  # receptive field, calibration and baseline
    ) -> None:
        checkpoint = Checkpoint(
            self.network, self.data.class_names, crop=self.data.crop, metrics=metrics, training=self.config,
            edits=self.edits, **measurements,
        )  # fmt: skip
        with stop_when_full():
            save(path, checkpoint, extra={"state_dict": weights} | (extra or {}))


def restore(
    run_dir: TrainRunDirectory,
    run_config: dict[str, Any],
    epochs: int,
    network: OpalNetwork,
    optimizer: Any,
    fabric: Fabric,
) -> tuple[TrainState, dict[str, Any]]:
    """Put network, optimizer, scaler and generators into the state of last.pt; return progress and stored config.

    Raises:
        CheckpointError: the state is damaged.
        UsageError: last.pt holds another run or no state, or more than `epochs` epochs are done.
    """
    last = read_checkpoint(run_dir.last)
    check_same_run(run_dir, last["training"], run_config)
    start_again = "give another --out, or --overwrite"
    if (raw := last.get(RESUME_KEY)) is None:
        raise UsageError(f"{run_dir.last}: holds no training state, so the run cannot be continued; {start_again}")
    try:
        state = TrainState.from_dict(raw["progress"])
        best, _ = state.best or (None, None)
        state.best_weights = last["state_dict"] if best == state.epoch else raw.get("best_weights")
        network.load_state_dict(last["state_dict"])
        optimizer.load_state_dict(raw["optimizer"])
        if raw["scaler"]:
            fabric.strategy.precision.load_state_dict(raw["scaler"])
        if len(raw["random"]) != fabric.world_size:
            raise ValueError("random state of other processes")
        # last, because building a network draws from the same generator
        machine.set_random_state(raw["random"][fabric.global_rank], fabric.device)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise CheckpointError(f"{run_dir.last}: its training state is damaged ({reason}); {start_again}") from None
    if state.epoch > epochs:
        raise UsageError(
            f"{run_dir.root}: {state.epoch} epochs are done, but --epochs is {epochs}; "
            f"give --epochs {state.epoch} or more, or another --out"
        )
    if state.best_weights is None:
        # an earlier version kept them in best.pt
        known = read_checkpoint(run_dir.best) if run_dir.best.is_file() else {"metrics": {}}
        if known["metrics"].get("epoch") != best:
            raise UsageError(f"{run_dir.best}: not the checkpoint of epoch {best}, the best of this run; {start_again}")
        state.best_weights = known["state_dict"]
    return state, last["training"]
