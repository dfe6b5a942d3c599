"""The files of a training run, its records and result, and whether a stored run is the one to resume.

    best.pt       complete whenever it exists: the first epoch's weights, in the end the best epoch's
    last.pt       the last epoch's weights, and the state that the next epoch depends on
    metrics.csv   one line per epoch
    config.json   the run's options, data set, weights, versions; recipe.toml repeats the run
    answers.csv   the out-of-fold answers to the training images, where no validation images were set aside
    summary.json  written last: a directory without it holds a run that has not ended

Every file is written under a temporary name and renamed, so a run killed at any moment leaves whole files. last.pt
holds the state of the end of one epoch: a resumed run repeats the epoch it was in. Imports no torch.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import atomic_write, remove_temporary_files, write_json
from opal_deploy.artifact.measurements import Calibration
from opal_deploy.datasets.checks import map_in_threads
from opal_deploy.datasets.samples import PATHS, DataSet, Sample
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import ClassCounts, Evaluation
from opal_deploy.train.options import CHANGEABLE_ON_RESUME, TrainOptions

FILES = (
    "best.pt", "last.pt", "metrics.csv", "answers.csv", "doubtful.html", "config.json", "recipe.toml", PATHS,
    "summary.json",
)  # fmt: skip
_END_BYTES = 4096
RESUME_ADVICE = "give --resume with the options that the run was started with, another --out, or --overwrite"


@dataclass(frozen=True)
class EpochRecord:
    """One line of metrics.csv. Losses are cross-entropies in nats, accuracies 0 ... 1.

    The training loss has class weights, if there are any, the validation loss has none. Training loss and accuracy are
    of the augmented images, measured while the weights still change.
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    seconds: float  # duration of training and validation
    images_per_second: float  # training images over the seconds of training, all processes together
    data_wait: float  # share of these seconds, 0 ... 1, that the first process waited for its next batch
    kept_off: float = 0.0  # mean penalty of kept-off regions, 0 ... 1, before its weight; 0 without `--keep-off`

    def describe(self, epochs: int, *, is_best: bool) -> str:
        """Return a line of text; `epochs` is the number of epochs of the run."""
        name, speed = "frozen network, fitted head", f"{self.images_per_second:.0f} feature maps/s"
        if self.epoch:
            name = f"epoch {self.epoch}/{epochs}"
            speed = f"{self.images_per_second:.0f} images/s, {self.data_wait:.0%} waiting for data"
        kept_off = f", {self.kept_off:.3f} in kept-off regions" if self.kept_off else ""
        return (
            f"{name}: training loss {self.train_loss:.4f}, {self.train_accuracy:.1%}{kept_off}; "
            f"validation loss {self.val_loss:.4f}, {self.val_accuracy:.1%}; {self.seconds:.1f} s, {speed}"
            f"{'; best so far' if is_best else ''}"
        )


@dataclass(frozen=True)
class WithoutCopies:
    """How many test images are no near copies of training images, and the accuracy on them, 0 ... 1."""

    images: int
    accuracy: float


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run.

    Attributes:
        best: the checkpoint to use.
        best_epoch: the checkpoint's epoch, counted from 1; 0 is the fitted head on the frozen network.
        epochs: one record per epoch, and one of epoch 0 if the head was fitted first.
        val: metrics of the best weights on the validation split.
        test: metrics of the best weights on the test split; None where the data set has none.
        without_copies: of the test images that are no near copies of training images; None where all or none are.
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
    without_copies: WithoutCopies | None
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


class TrainRunDirectory:
    """The directory of a training run; each file's path is an attribute."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.best, self.last, self.metrics = root / "best.pt", root / "last.pt", root / "metrics.csv"
        self.config, self.summary, self.recipe = root / "config.json", root / "summary.json", root / "recipe.toml"
        self.tensorboard, self.answers = root / "tensorboard", root / "answers.csv"
        self.doubtful = root / "doubtful.html"
        self.plain = root / "plain"  # of `--compare`

    def check(self, *, may_hold_run: bool) -> None:
        """Raise UsageError if the directory cannot be written to, or holds a run although it may not."""
        existing = [name for name in FILES if (self.root / name).exists()]
        if existing and not may_hold_run:
            raise UsageError(
                f"{self.root}: it already holds a run ({', '.join(existing)}); "
                "give --resume to continue it, another --out, or --overwrite"
            )
        folder = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            reason = "permission denied" if folder.is_dir() else "is not a folder"
            raise UsageError(f"{self.root}: cannot be written ({folder}: {reason}); give another --out")

    def start(self, config: dict[str, Any], recipe: str, data: Path, *, is_new: bool) -> None:
        """Write config, recipe and paths; remove temporary, summary, answers and, in a new run, all older files."""
        for name in FILES:
            # of processes killed while writing; this one holds the lock
            remove_temporary_files(self.root / name)
            if is_new or name in (self.summary.name, self.answers.name, self.doubtful.name):
                (self.root / name).unlink(missing_ok=True)
        if is_new:
            shutil.rmtree(self.tensorboard, ignore_errors=True)
        write_json(self.config, config)
        with atomic_write(self.recipe) as temporary:
            # a path in a recipe may have bytes that are not UTF-8
            temporary.write_text(recipe, encoding="utf-8", errors="surrogateescape")
        write_json(self.root / PATHS, {"data": str(data.resolve())})

    def write_epochs(self, epochs: list[EpochRecord]) -> None:
        """Write metrics.csv."""
        with atomic_write(self.metrics) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(EpochRecord)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(record) for record in epochs)


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


def refuse_other_run(path: Path, stored: Any, current: dict[str, Any]) -> None:
    """Raise UsageError with all differences if last.pt, at `path`, stores another configuration than the current one's.

    Options in `CHANGEABLE_ON_RESUME` and images that only measure may differ.
    """
    # as JSON stores them: lists for tuples
    stored, current, defaults = json.loads(json.dumps([stored, current, TrainOptions().to_config()]))
    # a stored run knows what `auto` stood for, see `precision` below
    ignored = {*CHANGEABLE_ON_RESUME, "precision"}
    # an option that an earlier version did not have was at its default; one that this version lacks meant nothing
    old, new = {**defaults, **stored["options"]}, current["options"]
    pairs = {key: (old[key], new[key]) for key in new.keys() - ignored}
    pairs |= {key: (stored.get(key), current[key]) for key in ("processes", "precision")}
    clauses = [f"{key} was {json.dumps(a)} and is {json.dumps(b)}" for key, (a, b) in sorted(pairs.items()) if a != b]
    if not has_same_images(stored, current, "train"):
        clauses.append("the training images, their labels, boxes or regions, or the classes have changed")
    if stored.get("start") != current["start"]:
        clauses.append("the checkpoint of --start-from has changed")
    if clauses:
        raise UsageError(f"{path.parent}: holds another run: {'; '.join(clauses)}; {RESUME_ADVICE}")


def has_same_images(stored: dict[str, Any], current: dict[str, Any], part: str) -> bool:
    """Return whether two configurations have one digest of a part, `train` or `measured`; see `fingerprint_dataset`."""
    before = stored.get("fingerprint")
    # the first versions stored one digest of names and sizes, which says nothing about these
    return isinstance(before, str) or (isinstance(before, dict) and before.get(part) == current["fingerprint"][part])


def fingerprint_dataset(data: DataSet, keep_off: Any = None) -> dict[str, str]:
    """Return a sha256 of the images trained on, `train`, and of those that only measure, `measured`.

    Both are over each image's path under the root, size and last 4 KiB, in which different images of one size differ,
    label and box; `train` is over class names and the file of kept-off regions, too. UsageError: a file is missing.
    """

    def describe(sample: Sample) -> bytes:
        is_below = sample.path.is_relative_to(data.root)
        name = sample.path.relative_to(data.root).as_posix() if is_below else sample.path.name
        with sample.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            return json.dumps([name, size, sample.label, sample.box, zlib.crc32(file.read())]).encode()

    try:
        digests = {"train": hashlib.sha256(json.dumps(data.class_names).encode()), "measured": hashlib.sha256()}
        for part, split in (("train", data.train), ("measured", data.val), ("measured", data.test)):
            for line in map_in_threads(describe, split):
                digests[part].update(line)
            digests[part].update(b"|")
        if keep_off is not None:
            digests["train"].update(Path(keep_off).read_bytes())
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read ({error.strerror}); put it back") from None
    return {part: digest.hexdigest() for part, digest in digests.items()}
