"""What a run leaves behind: best.pt, last.pt, metrics.csv, curves.png, config.json, recipe.toml, summary.json.

summary.json is written when all is done: a folder without it holds a run that can be continued.
Each file is written under another name and renamed, so that a run that is interrupted leaves whole files.
"""

from __future__ import annotations

import csv
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import atomic_write, remove_temporary_files, write_json
from opal_deploy.errors import UsageError

FILES = ("best.pt", "last.pt", "metrics.csv", "curves.png", "config.json", "recipe.toml", "summary.json")
# of runs that failed, or on request
_OTHERS = ("nonfinite_batch.txt",)


@dataclass(frozen=True)
class EpochRecord:
    """One line of metrics.csv. Losses are cross-entropies in nats, accuracies 0 ... 1.

    The training figures are of augmented pictures while the weights still changed.

    Attributes:
        seconds: of training and validation.
        images_per_second: training pictures over the seconds of training, all processes together.
        data_wait: share of these seconds, 0 ... 1, that the loop waited for its next batch (of the first process; a
            GPU may still have been busy with steps queued before).
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    seconds: float
    images_per_second: float
    data_wait: float


class TrainRunDirectory:
    """A run's folder and its files' paths."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.best, self.last = root / "best.pt", root / "last.pt"
        self.metrics, self.curves = root / "metrics.csv", root / "curves.png"
        self.config, self.summary = root / "config.json", root / "summary.json"
        self.recipe = root / "recipe.toml"
        self.bad_batch = root / "nonfinite_batch.txt"
        self.tensorboard = root / "tensorboard"

    @property
    def is_finished(self) -> bool:
        """Whether a run came to its end here."""
        return self.summary.is_file()

    def check_free(self) -> None:
        """Raise UsageError if the folder holds a run."""
        found = [name for name in FILES if (self.root / name).exists()]
        if found:
            raise UsageError(
                f"{self.root}: it already holds a run ({', '.join(found)}); "
                "give --resume to continue it, another --out, or --overwrite"
            )

    def remove_leftovers(self) -> None:
        """What processes left that were killed while they wrote; for whoever has the folder for itself."""
        for name in FILES:
            remove_temporary_files(self.root / name)

    def clear(self) -> None:
        """Make the folder, and take away an older run's files, so that no two runs mix.

        Raises:
            UsageError: it cannot be written to.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for name in (*FILES, *_OTHERS):
                (self.root / name).unlink(missing_ok=True)
            if self.tensorboard.is_dir():
                shutil.rmtree(self.tensorboard)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{self.root}: cannot be written ({reason}); give another --out") from None

    def write_json(self, path: Path, document: dict[str, Any]) -> None:
        """`path` is one of the folder's own."""
        write_json(path, document)

    def write_text(self, path: Path, text: str) -> None:
        """`path` is one of the folder's own."""
        with atomic_write(path) as temporary:
            # a path that a recipe holds may have bytes that are no UTF-8
            temporary.write_text(text, encoding="utf-8", errors="surrogateescape")

    def read_epochs(self) -> list[EpochRecord]:
        """What metrics.csv holds; nothing where it is gone.

        Raises:
            UsageError: it cannot be read.
        """
        if not self.metrics.is_file():
            return []
        try:
            with self.metrics.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
            return [EpochRecord(**{k: int(v) if k == "epoch" else float(v) for k, v in row.items()}) for row in rows]  # type: ignore[arg-type]
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"{self.metrics}: not readable ({error}); train again with --overwrite") from None

    def write_epochs(self, epochs: list[EpochRecord]) -> None:
        """metrics.csv and curves.png, with all epochs up to now."""
        with atomic_write(self.metrics) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(EpochRecord)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(record) for record in epochs)
        with atomic_write(self.curves) as temporary:
            _draw(epochs, temporary)


def _draw(epochs: list[EpochRecord], path: Path) -> None:
    # the object interface: pyplot keeps global state and looks for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    numbers = [record.epoch for record in epochs]
    for axes, name in ((loss, "loss"), (accuracy, "accuracy")):
        for split, label in (("train", "training (augmented)"), ("val", "validation")):
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
