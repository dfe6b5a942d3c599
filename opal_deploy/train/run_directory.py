"""The files of a training run, and what a run is resumed from.

    best.pt       complete whenever it exists: the first epoch's weights, in the end the best epoch's
    last.pt       the last epoch's weights; of an unfinished run also the state that the next epoch depends on
    metrics.csv   one line per epoch; curves.png draws it
    config.json   the run's options, data set, weights, versions; recipe.toml repeats the run
    summary.json  written last: a directory without it holds a run that can be continued

Every file is written under a temporary name and renamed, so a run killed at any moment leaves whole files. last.pt
holds the state of the end of one epoch: a resumed run repeats the epoch it was in. Imports torch only to read and write
checkpoints.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import atomic_write, read_json, remove_temporary_files, without_folders, write_json
from opal_deploy.artifact.measurements import Calibration
from opal_deploy.datasets.location import PATHS
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import CheckpointError, StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import ClassCounts, Evaluation
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.train.options import CHANGEABLE_ON_RESUME, OUTSIDE, TrainOptions

if TYPE_CHECKING:
    from torch import Tensor

FILES = ("best.pt", "last.pt", "metrics.csv", "curves.png", "config.json", "recipe.toml", PATHS, "summary.json")
RESUME_ADVICE = "give --resume with the options that the run was started with, another --out, or --overwrite"


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
        name = f"epoch {self.epoch}/{epochs}" if self.epoch else "frozen network, fitted head"
        kept_off = f", {self.kept_off:.3f} in kept-off regions" if self.kept_off else ""
        speed = (
            f"{self.images_per_second:.0f} images/s, {self.data_wait:.0%} waiting for data"
            if self.epoch
            else f"{self.images_per_second:.0f} feature maps/s"
        )
        return (
            f"{name}: training loss {self.train_loss:.4f}, {self.train_accuracy:.1%}{kept_off}; "
            f"validation loss {self.val_loss:.4f}, {self.val_accuracy:.1%}; {self.seconds:.1f} s, {speed}"
            f"{'; best so far' if is_best else ''}"
        )


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run.

    Attributes:
        best: the checkpoint to use.
        best_epoch: the checkpoint's epoch, counted from 1; 0 is the fitted head on the frozen network.
        epochs: one record per epoch, and one of epoch 0 if the head was fitted first.
        val: metrics of the best weights on the validation split.
        test: metrics of the best weights on the test split; None where the data set has none.
        calibration: calibration of the best weights on the validation split.
        last: the checkpoint of the last epoch.
        config: the content of config.json: options, data set, weights, versions.
        classes: answers per class on the test split, or on the validation split without one.
        rates: the rates that --min-margin and --unknown take with the validation images, in a line each.
    """

    best: Path
    best_epoch: int
    epochs: list[EpochRecord]
    val: Evaluation
    test: Evaluation | None
    calibration: Calibration
    last: Path
    config: dict[str, Any]
    classes: list[ClassCounts]
    rates: list[str]

    def __repr__(self) -> str:
        test = "" if self.test is None else f", test accuracy {self.test.accuracy:.2%}"
        return (
            f"<TrainResult {self.best}: epoch {self.best_epoch} of {self.epochs[-1].epoch}, "
            f"validation accuracy {self.val.accuracy:.2%}{test}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return paths and metrics as plain values for JSON, without the configuration."""
        paths = {"best": str(self.best), "last": str(self.last)}
        document = {**asdict(self), **paths, "calibration": self.calibration.to_dict()}
        del document["config"]
        return document


@dataclass
class TrainState:
    """The progress of a run after an epoch.

    Attributes:
        epoch: number of finished epochs.
        records: one per finished epoch.
        best: epoch and validation metrics of the best weights so far.
        planned_epochs: the number of epochs that `--minutes` leaves time for; None without it.
        checkpoint_metrics: the metrics that last.pt carries.
        best_weights: the best weights so far, on the CPU; None while they are those of `epoch`.
    """

    epoch: int = 0
    records: list[EpochRecord] = field(default_factory=list)
    best: tuple[int, Evaluation] | None = None
    planned_epochs: int | None = None
    checkpoint_metrics: dict[str, Any] = field(default_factory=dict)
    best_weights: dict[str, Tensor] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the progress without the weights as plain values; `from_dict` reads them."""
        return asdict(replace(self, best_weights=None))

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> TrainState:
        """Return the progress that last.pt holds, written by this or an earlier version."""
        if raw.get("step"):
            raise ValueError("saved within an epoch by an earlier version")
        best = raw["best"]
        return TrainState(
            raw["epoch"],
            [EpochRecord(**record) for record in raw["records"]],
            None if best is None else (best[0], Evaluation(**best[1])),
            raw.get("planned_epochs"),
            raw["checkpoint_metrics"],
        )


class TrainRunDirectory:
    """The directory of a training run; each file's path is an attribute."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.best, self.last = root / "best.pt", root / "last.pt"
        self.metrics, self.curves = root / "metrics.csv", root / "curves.png"
        self.config, self.summary = root / "config.json", root / "summary.json"
        self.recipe, self.paths = root / "recipe.toml", root / PATHS
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

    def start(self, config: dict[str, Any], recipe: str, data: Path, *, is_new: bool) -> None:
        """Write config.json, recipe.toml and paths.json; remove temporary files and, of a new run, older files.

        Raises:
            UsageError: the directory cannot be written to.
        """
        # of processes killed while writing; this one holds the lock
        for name in FILES:
            remove_temporary_files(self.root / name)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if is_new:
                for name in FILES:
                    (self.root / name).unlink(missing_ok=True)
                shutil.rmtree(self.tensorboard, ignore_errors=True)
        except OSError as error:
            raise UsageError(f"{self.root}: cannot be written ({error.strerror}); give another --out") from None
        write_json(self.config, config)
        with atomic_write(self.recipe) as temporary:
            # a path in a recipe may have bytes that are not UTF-8
            temporary.write_text(recipe, encoding="utf-8", errors="surrogateescape")
        write_json(self.paths, {"data": str(data.resolve())})

    def read_config(self) -> dict[str, Any] | None:
        """Return the content of config.json; None without such a file.

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            config = read_json(self.config)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.config}: not readable ({error}); {RESUME_ADVICE}") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{self.config}: not the configuration of a run; {RESUME_ADVICE}")
        return config

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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a run's own checkpoint.

    Raises:
        CheckpointError: the file is damaged, or not a checkpoint of this trainer.
    """
    from opal_deploy.model.state_dicts import load_torch_file

    try:
        raw = load_torch_file(path)
    except CheckpointError:
        raise CheckpointError(f"{path}: damaged, so the run cannot be continued; {RESUME_ADVICE}") from None
    if not isinstance(raw, dict) or not {"state_dict", "training", "metrics"} <= raw.keys():
        raise CheckpointError(f"{path}: not a checkpoint of this trainer's; {RESUME_ADVICE}")
    return raw


@contextmanager
def stop_when_full() -> Iterator[None]:
    """Turn an error of writing into StoppedEarly."""
    try:
        yield
    except (UsageError, OSError) as error:
        reason = " ".join(str(error).split()).removesuffix("; choose another place")
        raise StoppedEarly(
            f"{reason}; what was there before is unharmed; make room and repeat the command with --resume"
        ) from None


# another run or the same ----------------------------------------------------------------------------------------------


def check_same_run(run_dir: TrainRunDirectory, stored: Any, run_config: dict[str, Any]) -> None:
    """Raise UsageError with the differences between the stored configuration of a run and the one to resume it with.

    Args:
        run_dir: the run's directory.
        stored: the configuration in last.pt or config.json; None before any was written.
        run_config: `options`, `fingerprint`, `processes`, `precision` and `start`, or some of them.
    """
    if stored is not None and (differences := describe_differences(stored, run_config)):
        raise UsageError(f"{run_dir.root}: holds another run: {'; '.join(differences)}; {RESUME_ADVICE}")


def describe_differences(stored: Any, run_config: dict[str, Any]) -> list[str]:
    """Return a clause for each difference between two configurations, except for options that may change."""
    if not isinstance(stored, dict) or not isinstance(stored.get("options"), dict):
        return ["its configuration cannot be read"]
    stored, run_config, defaults = json.loads(json.dumps([stored, run_config, TrainOptions().to_config()]))
    # earlier versions stored whole paths
    stored["options"], run_config["options"] = without_folders([stored["options"], run_config["options"]])
    # an option that an earlier version did not have was at its default; one that this version lacks meant nothing
    old, new = {**defaults, **stored["options"]}, run_config["options"]
    # an earlier version did not store those that it had planned with the options
    old |= {name: stored.get(name) for name in ("epochs", "batch_size") if old[name] is None}
    # a stored run knows what `auto` stood for; for the new run it is compared below, or not known yet
    ignored = {*CHANGEABLE_ON_RESUME, "save_every"}
    old["precision"] = stored.get("precision", old.get("precision"))
    if "precision" in run_config or new.get("precision") == "auto":
        ignored.add("precision")
    if new.get("schedule") == "cosine":
        # its learning rates depend on the number of epochs
        ignored.discard("epochs")
    keys = [key for key in {**old, **new} if key not in ignored and old.get(key) != new.get(key)]
    clauses = [f"{key} was {_shorten(old.get(key))} and is {_shorten(new.get(key))}" for key in keys]
    others = {
        "fingerprint": "the images, labels, boxes, splits or regions of the data set have changed",
        "processes": f"processes was {stored.get('processes')} and is {run_config.get('processes')}",
        "start": "the checkpoint of --start-from has changed",
        "precision": f"precision was {stored.get('precision')} and is {run_config.get('precision')}",
    }
    return clauses + [text for key, text in others.items() if key in run_config and stored.get(key) != run_config[key]]


def fingerprint_dataset(data: DataSet, keep_off: Any = None) -> str:
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
    if keep_off not in (None, OUTSIDE):
        digest.update(read_keep_off(keep_off))
    return digest.hexdigest()


def read_keep_off(name: Any) -> bytes:
    """Return the content of the file of `--keep-off`; UsageError if it cannot be read."""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"--keep-off {name}: cannot be read ({error.strerror}); expected a COCO file, or {OUTSIDE}"
        ) from None


def load_finished_result(run_dir: TrainRunDirectory, run_config: dict[str, Any], options: TrainOptions) -> TrainResult:
    """Return the result of a finished run.

    Args:
        run_dir: the run's directory.
        run_config: see `check_same_run`.
        options: of the run, with the number of epochs that was asked for.

    Raises:
        UsageError: the directory holds another run, or one with another number of epochs.
    """
    best, last = read_checkpoint(run_dir.best), read_checkpoint(run_dir.last)
    # processes and precision matter only to further steps
    check_same_run(run_dir, last["training"], {key: run_config[key] for key in ("options", "fingerprint", "start")})
    done, metrics, epochs = last["metrics"].get("epoch"), best["metrics"], options.epochs or 0
    was_stopped = options.minutes is not None or stops_after(options, done, metrics["epoch"])
    if done != epochs and not (done < epochs and was_stopped):
        raise UsageError(
            f"{run_dir.root}: the run is finished after {done} epochs and cannot be extended to {epochs}; "
            "give another --out, or --overwrite"
        )
    test = parse_evaluation(metrics, "test") if "test_loss" in metrics else None
    val = parse_evaluation(metrics, "val")
    # absent in runs of earlier versions
    classes = [ClassCounts(**counts) for counts in read_json(run_dir.summary).get("classes", [])]
    rates = [*describe_supported_rates(val.risk or {}, Baseline.from_dict(best.get("baseline") or {}))]
    return TrainResult(
        run_dir.best, metrics["epoch"], run_dir.read_epochs(), val, test, Calibration(**best["calibration"]),
        run_dir.last, best["training"], classes, rates,
    )  # fmt: skip


def stops_after(options: TrainOptions, epoch: int, best_epoch: int) -> bool:
    """Return whether `--patience` ends the run after an epoch, given the best epoch so far."""
    return options.patience is not None and epoch - best_epoch >= options.patience


def parse_evaluation(metrics: dict[str, Any], split: str) -> Evaluation:
    """Return the evaluation that `Evaluation.to_dict(split)` wrote into the metrics of a checkpoint."""
    values = {name.removeprefix(f"{split}_"): value for name, value in metrics.items()}
    return Evaluation(**{field.name: values[field.name] for field in fields(Evaluation) if field.name in values})


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


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
