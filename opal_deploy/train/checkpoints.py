"""The checkpoints and the progress of a training run: written while it trains, and read to resume it.

last.pt of an unfinished run also holds everything that the next step depends on, in the same file, so that a run killed
at any moment leaves the state of one moment. Order and augmentation of the images depend on seed, epoch and position
only (see `images`) and need no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from opal_deploy.artifact.files import remove_temporary_files, write_json
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import CheckpointError, StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.state_dicts import load_torch_file
from opal_deploy.records.names import escape_name
from opal_deploy.train.epoch import EpochMetrics, TrainStep
from opal_deploy.train.machine import ProcessGroup
from opal_deploy.train.measure import Measurements
from opal_deploy.train.run_directory import FILES, EpochRecord, TrainRunDirectory

# the key in last.pt next to the checkpoint's own
RESUME_KEY = "resume"
RESUME_ADVICE = "give --resume with the options that the run was started with, another --out, or --overwrite"


@dataclass
class TrainState:
    """The progress of a run.

    Attributes:
        epoch: number of finished epochs.
        step: number of finished steps of the next epoch.
        epoch_metrics: running totals of the next epoch.
        records: one per finished epoch.
        best: epoch and validation metrics of the best weights so far.
        planned_epochs: the number of epochs that `--minutes` leaves time for; None without it.
        checkpoint_metrics: the metrics that last.pt carries.
    """

    epoch: int = 0
    step: int = 0
    epoch_metrics: EpochMetrics = field(default_factory=EpochMetrics)
    records: list[EpochRecord] = field(default_factory=list)
    best: tuple[int, Evaluation] | None = None
    planned_epochs: int | None = None
    checkpoint_metrics: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> TrainState:
        """Return the progress whose `asdict` last.pt holds."""
        best = raw["best"]
        return TrainState(
            raw["epoch"],
            raw["step"],
            EpochMetrics(**raw["epoch_metrics"]),
            [EpochRecord(**record) for record in raw["records"]],
            None if best is None else (best[0], Evaluation(**best[1])),
            raw.get("planned_epochs"),  # absent in runs of earlier versions
            raw["checkpoint_metrics"],
        )


class CheckpointManager:
    """Writes the checkpoints and records of one run; only the main process writes.

    Attributes:
        run_dir: the run's directory.
        run_config: the resolved configuration, for checkpoints and config.json.
    """

    def __init__(
        self,
        run_dir: TrainRunDirectory,
        data: DataSet,
        group: ProcessGroup,
        network: OpalNetwork,
        run_config: dict[str, Any],
        edits: tuple[dict[str, Any], ...] = (),
    ) -> None:
        self.run_dir, self.run_config, self._edits = run_dir, run_config, edits
        self._data, self._group, self._network = data, group, network

    def start(self, recipe: str, *, is_new: bool) -> None:
        """Write config.json, recipe.toml and paths.json; remove temporary files and, of a new run, older files."""
        if self._group.is_main:
            # of processes killed while writing; this one holds the lock
            for name in FILES:
                remove_temporary_files(self.run_dir.root / name)
            if is_new:
                self.run_dir.clear()
            with _stop_when_full(TrainState()):
                write_json(self.run_dir.config, self.run_config)
                self.run_dir.write_text(self.run_dir.recipe, recipe)
                write_json(self.run_dir.paths, {"data": str(self._data.root.resolve())})

    def save_best(self, progress: TrainState, epoch: int, val: Evaluation) -> None:
        """Write this epoch's weights to best.pt."""
        if self._group.is_main:
            with _stop_when_full(progress):
                self._save(self.run_dir.best, {"epoch": epoch, **val.to_dict("val")})
        progress.best = (epoch, val)

    def save_last(self, progress: TrainState, train_step: TrainStep) -> None:
        """Write last.pt with everything that the next step depends on."""
        # every process draws random numbers of its own
        random_states = self._group.all_gather(get_random_state(self._group.device))
        if not self._group.is_main:
            return
        state = {
            "progress": asdict(progress),
            "optimizer": train_step.optimizer.state_dict(),
            "scaler": train_step.scaler.state_dict(),
            "random": random_states,
        }
        with _stop_when_full(progress):
            self._save(self.run_dir.last, progress.checkpoint_metrics, {RESUME_KEY: state})

    def write_epochs(self, progress: TrainState) -> None:
        """Write metrics.csv and curves.png."""
        if self._group.is_main:
            with _stop_when_full(progress):
                self.run_dir.write_epochs(progress.records, augmented=self.run_config["options"]["augment"] != "none")

    def finish(
        self,
        progress: TrainState,
        metrics: dict[str, Any],
        measured: Measurements,
    ) -> None:
        """Write best.pt with its metrics and the network's measurements, then summary.json.

        Expects the best weights in the network.
        """
        if not self._group.is_main:
            return
        records = progress.records
        summary = {
            **metrics,
            "calibration": measured.calibration.to_dict(),
            "classes": [asdict(each) for each in measured.classes],
            "linear_accuracy": self.run_config.get("linear_accuracy"),
            "classifier_accuracy": self.run_config.get("classifier_accuracy"),
            "epochs": progress.epoch,
            "seconds": sum(record.seconds for record in records),
            "images_per_second": records[-1].images_per_second,
        }
        with _stop_when_full(progress):
            self._save(
                self.run_dir.best,
                metrics,
                receptive_field=measured.receptive_field,
                calibration=measured.calibration,
                baseline=measured.baseline,
            )
            self.write_epochs(progress)
            write_json(self.run_dir.summary, summary)
            # a finished run needs no state for resuming
            self._network.load_state_dict(load_run_file(self.run_dir.last)["state_dict"])
            self._network.neighbours = None
            self._save(self.run_dir.last, progress.checkpoint_metrics)

    def write_nonfinite_batch(self, files: list[Path]) -> str:
        """List the batch's image files, one per line; return the list's path with the first names."""
        names = [escape_name(str(path)).replace("\n", "\\x0a") for path in files]
        if self._group.is_main:
            # the loss is reported whether or not this file can be written
            with suppress(UsageError, OSError, UnicodeError):
                self.run_dir.write_text(self.run_dir.nonfinite_batch, "\n".join(names) + "\n")
        return f"{self.run_dir.nonfinite_batch}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"

    def _save(
        self,
        path: Path,
        metrics: dict[str, Any],
        extra: dict[str, Any] | None = None,
        **measurements: Any,  # receptive field, calibration and baseline of a finished run
    ) -> None:
        checkpoint = Checkpoint(
            self._network, self._data.class_names, crop=self._data.crop,
            metrics=metrics, training=self.run_config, edits=self._edits, **measurements,
        )  # fmt: skip
        save(path, checkpoint, extra=extra)


def has_finite_weights(network: OpalNetwork) -> bool:
    """Return whether every weight is finite; a finite loss can have an infinite gradient."""
    return all(bool(torch.isfinite(weight).all()) for weight in network.parameters())


def describe_kept(progress: TrainState) -> str:
    """Return a clause that names the checkpoint kept by a stopped run."""
    return f"best.pt holds epoch {progress.best[0]}" if progress.best else "nothing was kept yet"


@contextmanager
def _stop_when_full(progress: TrainState) -> Iterator[None]:
    try:
        yield
    except (UsageError, OSError) as error:
        reason = " ".join(str(error).split()).removesuffix("; choose another place")
        raise StoppedEarly(
            f"{reason}; {describe_kept(progress)}, and what was there before is unharmed; "
            "make room and repeat the command with --resume"
        ) from None


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's torch generators, which stochastic depth and dropout draw from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_run_file(path: Path) -> dict[str, Any]:
    """Return the content of a run's own checkpoint.

    Raises:
        CheckpointError: the file is damaged, or not a checkpoint of this trainer.
    """
    try:
        raw = load_torch_file(path)
    except CheckpointError:
        raise CheckpointError(f"{path}: damaged, so the run cannot be continued; {RESUME_ADVICE}") from None
    if not isinstance(raw, dict) or not {"state_dict", "training", "metrics"} <= raw.keys():
        raise CheckpointError(f"{path}: not a checkpoint of this trainer's; {RESUME_ADVICE}")
    return raw
