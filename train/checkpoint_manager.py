"""What a run writes, by the one process that writes, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.network import OpalNetwork
from opal_deploy.records.names import escape_name
from opal_deploy.train import resume as resuming
from opal_deploy.train.distributed import ProcessGroup
from opal_deploy.train.epoch import TrainStep
from opal_deploy.train.resume import Progress
from opal_deploy.train.run_directory import TrainRunDirectory
from opal_deploy.train.validation import Evaluation


class CheckpointManager:
    """Checkpoints and records of one run; in processes that do not write, every method does nothing.

    Attributes:
        folder: the run's.
        resolved: what the run is, for checkpoints and config.json.
    """

    def __init__(
        self,
        folder: TrainRunDirectory,
        data: DataSet,
        group: ProcessGroup,
        network: OpalNetwork,
        resolved: dict[str, Any],
    ) -> None:
        self.folder, self.resolved = folder, resolved
        self._data, self._group, self._network = data, group, network

    def begin(self, recipe: str, *, anew: bool) -> None:
        """config.json and recipe.toml; takes away what killed processes left, and with `anew` an older run's files."""
        if self._group.is_writer:
            self.folder.remove_leftovers()
            if anew:
                self.folder.clear()
            with _stop_when_full(Progress()):
                self.folder.write_json(self.folder.config, self.resolved)
                self.folder.write_text(self.folder.recipe, recipe)

    def best(self, progress: Progress, epoch: int, val: Evaluation) -> None:
        """best.pt is of this epoch from now on."""
        if self._group.is_writer:
            with _stop_when_full(progress):
                self._write(self.folder.best, {"epoch": epoch, **val.to_dict("val")})
        progress.best = (epoch, val)

    def last(self, progress: Progress, learner: TrainStep) -> None:
        """last.pt, with all that the next step depends on."""
        # of every process: what it draws next
        random = self._group.everyone(resuming.get_random_state(self._group.device))
        if not self._group.is_writer:
            return
        state = {
            "progress": progress.to_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "scaler": learner.scaler.state_dict(),
            "random": random,
        }
        with _stop_when_full(progress):
            self._write(self.folder.last, progress.figures, {resuming.RESUME_KEY: state})

    def epochs(self, progress: Progress) -> None:
        """metrics.csv and curves.png."""
        if self._group.is_writer:
            with _stop_when_full(progress):
                self.folder.write_epochs(progress.records)

    def finish(self, progress: Progress, figures: dict[str, Any]) -> None:
        """best.pt with its test figures, then summary.json; the network holds the best weights."""
        if not self._group.is_writer:
            return
        records = progress.records
        summary = {
            **figures,
            "epochs": len(records),
            "seconds": sum(record.seconds for record in records),
            "images_per_second": records[-1].images_per_second,
        }
        with _stop_when_full(progress):
            self._write(self.folder.best, figures)
            self.folder.write_epochs(records)
            self.folder.write_json(self.folder.summary, summary)
            # from here on the run is finished, and what continued it only takes room
            self._network.load_state_dict(resuming.load_run_file(self.folder.last)["state_dict"])
            self._write(self.folder.last, progress.figures)

    def bad_batch(self, files: list[Path]) -> str:
        """Lists the files, one a line; returns where."""
        names = [escape_name(str(path)).replace("\n", "\\x0a") for path in files]
        if self._group.is_writer:
            # the loss is what has to be said, whether or not this can be written
            with suppress(UsageError, OSError, UnicodeError):
                self.folder.write_text(self.folder.bad_batch, "\n".join(names) + "\n")
        return f"{self.folder.bad_batch}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"

    def _write(self, path: Path, metrics: dict[str, Any], beside: dict[str, Any] | None = None) -> None:
        names, crop = self._data.class_names, self._data.crop
        checkpoint = Checkpoint(self._network, names, crop=crop, metrics=metrics, training=self.resolved)
        save(path, checkpoint, beside=beside)


def has_finite_weights(network: OpalNetwork) -> bool:
    """Whether every weight is a number: a loss can be one while its gradient is none."""
    return all(bool(torch.isfinite(weight).all()) for weight in network.parameters())


def describe_kept(progress: Progress) -> str:
    """What a run that stops has kept."""
    return f"best.pt holds epoch {progress.best[0]}" if progress.best else "nothing was kept yet"


@contextmanager
def _stop_when_full(progress: Progress) -> Iterator[None]:
    try:
        yield
    except (UsageError, OSError) as error:
        reason = " ".join(str(error).split()).removesuffix("; choose another place")
        raise StoppedEarly(
            f"{reason}; {describe_kept(progress)}, and what was there before is unharmed; "
            "make room and repeat the command with --resume"
        ) from None
