"""Writing of checkpoints and records during a run, and the error for a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from opal_deploy.artifact.measurements import Calibration, ReceptiveField
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.network import OpalNetwork
from opal_deploy.records.names import escape_name
from opal_deploy.train.distributed import ProcessGroup
from opal_deploy.train.epoch import TrainStep
from opal_deploy.train.resume import RESUME_KEY, TrainState, get_random_state, load_run_file
from opal_deploy.train.run_directory import EpochRecord, TrainRunDirectory
from opal_deploy.train.validation import Evaluation


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
    ) -> None:
        self.run_dir, self.run_config = run_dir, run_config
        self._data, self._group, self._network = data, group, network

    def start(self, recipe: str, *, is_new: bool) -> None:
        """Write config.json and recipe.toml; remove temporary files, and before a new run the files of an older one."""
        if self._group.is_main:
            self.run_dir.remove_temporary_files()
            if is_new:
                self.run_dir.clear()
            with _stop_when_full(TrainState()):
                self.run_dir.write_json(self.run_dir.config, self.run_config)
                self.run_dir.write_text(self.run_dir.recipe, recipe)

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
            "progress": progress.to_dict(),
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
                self._write_epochs(progress.records)

    def _write_epochs(self, records: list[EpochRecord]) -> None:
        self.run_dir.write_epochs(records, augmented=self.run_config["options"]["augment"] != "none")

    def finish(
        self,
        progress: TrainState,
        metrics: dict[str, Any],
        receptive_field: ReceptiveField | None,
        calibration: Calibration,
    ) -> None:
        """Write best.pt with its test metrics, receptive field and calibration, then summary.json.

        The network holds the best weights.
        """
        if not self._group.is_main:
            return
        records = progress.records
        summary = {
            **metrics,
            "calibration": calibration.to_dict(),
            "epochs": len(records),
            "seconds": sum(record.seconds for record in records),
            "images_per_second": records[-1].images_per_second,
        }
        with _stop_when_full(progress):
            self._save(self.run_dir.best, metrics, receptive_field=receptive_field, calibration=calibration)
            self._write_epochs(records)
            self.run_dir.write_json(self.run_dir.summary, summary)
            # the run is finished now: last.pt needs no state for resuming any more
            self._network.load_state_dict(load_run_file(self.run_dir.last)["state_dict"])
            self._save(self.run_dir.last, progress.checkpoint_metrics)

    def write_nonfinite_batch(self, files: list[Path]) -> str:
        """List the batch's image files, one a line; return the list's path with the first names."""
        names = [escape_name(str(path)).replace("\n", "\\x0a") for path in files]
        if self._group.is_main:
            # the loss has to be reported whether or not this file can be written
            with suppress(UsageError, OSError, UnicodeError):
                self.run_dir.write_text(self.run_dir.nonfinite_batch, "\n".join(names) + "\n")
        return f"{self.run_dir.nonfinite_batch}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"

    def _save(
        self,
        path: Path,
        metrics: dict[str, Any],
        extra: dict[str, Any] | None = None,
        receptive_field: ReceptiveField | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        checkpoint = Checkpoint(
            self._network,
            self._data.class_names,
            crop=self._data.crop,
            metrics=metrics,
            training=self.run_config,
            receptive_field=receptive_field,
            calibration=calibration,
        )
        save(path, checkpoint, extra=extra)


def has_finite_weights(network: OpalNetwork) -> bool:
    """Return whether every weight is finite; a finite loss can have an infinite gradient."""
    return all(bool(torch.isfinite(weight).all()) for weight in network.parameters())


def describe_kept(progress: TrainState) -> str:
    """Return a clause that says which checkpoint a stopped run has kept."""
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
