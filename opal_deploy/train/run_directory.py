"""The files of a training run: best.pt, last.pt, metrics.csv, curves.png, config.json, recipe.toml, summary.json.

summary.json is written last: a directory without it holds a run that can be continued. Every file is written under a
temporary name and renamed, so an interrupted run leaves whole files. Imports no torch; `checkpoints` writes best.pt and
last.pt.
"""

from __future__ import annotations

import csv
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import atomic_write
from opal_deploy.datasets.location import PATHS
from opal_deploy.errors import UsageError

FILES = ("best.pt", "last.pt", "metrics.csv", "curves.png", "config.json", "recipe.toml", PATHS, "summary.json")
# written by failed runs only
_FAILURE_FILES = ("nonfinite_batch.txt",)


@dataclass(frozen=True)
class EpochRecord:
    """One line of metrics.csv. Losses are cross-entropies in nats, accuracies 0 ... 1.

    The training loss has class weights, if there are any, the validation loss has none. Training loss and accuracy are
    of the images as trained on (augmented, unless with `--augment none`), measured while the weights still change.

    Attributes:
        seconds: duration of training and validation.
        images_per_second: training images over the seconds of training, all processes together.
        data_wait: share of these seconds, 0 ... 1, that the first process waited for its next batch (a GPU may have
            been busy with queued steps meanwhile).
        kept_off: mean over the training images of the penalty of kept-off regions, 0 ... 1, before its weight; 0
            without `--keep-off`.
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    seconds: float
    images_per_second: float
    data_wait: float
    kept_off: float = 0.0

    def describe(self, epochs: int, *, is_best: bool) -> str:
        """Return a line of text; `epochs` is the number of epochs of the run."""
        best = "; best so far" if is_best else ""
        if self.epoch == 0:
            return (
                f"frozen network, fitted head: training loss {self.train_loss:.4f}, {self.train_accuracy:.1%}; "
                f"validation loss {self.val_loss:.4f}, {self.val_accuracy:.1%}; {self.seconds:.1f} s, "
                f"{self.images_per_second:.0f} feature maps/s{best}"
            )
        kept_off = f", {self.kept_off:.3f} in kept-off regions" if self.kept_off else ""
        return (
            f"epoch {self.epoch}/{epochs}: training loss {self.train_loss:.4f}, {self.train_accuracy:.1%}{kept_off}; "
            f"validation loss {self.val_loss:.4f}, {self.val_accuracy:.1%}; {self.seconds:.1f} s, "
            f"{self.images_per_second:.0f} images/s, {self.data_wait:.0%} waiting for data"
            f"{best}"
        )


class TrainRunDirectory:
    """The directory of a training run; each file's path is an attribute."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.best, self.last = root / "best.pt", root / "last.pt"
        self.metrics, self.curves = root / "metrics.csv", root / "curves.png"
        self.config, self.summary = root / "config.json", root / "summary.json"
        self.recipe, self.paths = root / "recipe.toml", root / PATHS
        self.nonfinite_batch = root / "nonfinite_batch.txt"
        self.tensorboard = root / "tensorboard"

    @property
    def is_finished(self) -> bool:
        """Whether the directory holds a finished run."""
        return self.summary.is_file()

    def check_free(self) -> None:
        """Raise UsageError if the directory holds a run."""
        existing = [name for name in FILES if (self.root / name).exists()]
        if existing:
            raise UsageError(
                f"{self.root}: it already holds a run ({', '.join(existing)}); "
                "give --resume to continue it, another --out, or --overwrite"
            )

    def check_writable(self) -> None:
        """Raise UsageError if the directory cannot be made or written to; changes nothing."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        reason = "is not a folder" if not existing.is_dir() else "permission denied"
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            where = "" if existing == self.root else f"{existing}: "
            raise UsageError(f"{self.root}: cannot be written ({where}{reason}); give another --out")

    def clear(self) -> None:
        """Make the directory and remove an older run's files.

        Raises:
            UsageError: the directory cannot be written to.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for name in (*FILES, *_FAILURE_FILES):
                (self.root / name).unlink(missing_ok=True)
            if self.tensorboard.is_dir():
                shutil.rmtree(self.tensorboard)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{self.root}: cannot be written ({reason}); give another --out") from None

    def write_text(self, path: Path, text: str) -> None:
        """Write one of the directory's text files."""
        with atomic_write(path) as temporary:
            # a path in a recipe may have bytes that are not UTF-8
            temporary.write_text(text, encoding="utf-8", errors="surrogateescape")

    def open_summary_writer(self, first_epoch: int) -> AbstractContextManager[Any]:
        """Return TensorBoard's writer, which hides earlier logs from `first_epoch` on."""
        from torch.utils.tensorboard import SummaryWriter

        writer: AbstractContextManager[Any] = SummaryWriter(str(self.tensorboard), purge_step=first_epoch)
        return writer

    def read_epochs(self) -> list[EpochRecord]:
        """Return the records of metrics.csv; empty without such a file.

        Raises:
            UsageError: the file cannot be read.
        """
        if not self.metrics.is_file():
            return []
        try:
            with self.metrics.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
            return [EpochRecord(**{k: int(v) if k == "epoch" else float(v) for k, v in row.items()}) for row in rows]  # type: ignore[arg-type]
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"{self.metrics}: not readable ({error}); train again with --overwrite") from None

    def write_epochs(self, epochs: list[EpochRecord], *, augmented: bool) -> None:
        """Write metrics.csv and curves.png; `augmented` says whether the training images were."""
        with atomic_write(self.metrics) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(EpochRecord)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(record) for record in epochs)
        with atomic_write(self.curves) as temporary:
            _draw_curves(epochs, temporary, "training (augmented)" if augmented else "training")


def _draw_curves(epochs: list[EpochRecord], path: Path, training: str) -> None:
    # the object interface: pyplot keeps global state and looks for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    numbers = [record.epoch for record in epochs]
    for axes, name in ((loss, "loss"), (accuracy, "accuracy")):
        for split, label in (("train", training), ("val", "validation")):
            axes.plot(numbers, [getattr(r, f"{split}_{name}") for r in epochs], marker=".", label=label)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    best = min(epochs, key=lambda record: record.val_loss)
    loss.axvline(best.epoch, color="grey", linestyle=":", label="best")
    loss.set_ylabel("cross-entropy [nats]")
    accuracy.set_ylabel("accuracy")
    accuracy.set_ylim(0.0, 1.0)
    loss.legend()
    figure.savefig(path, dpi=110, format="png")
