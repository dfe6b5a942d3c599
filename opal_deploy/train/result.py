"""The outcome of a training run, at its end or read from its directory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import read_json
from opal_deploy.artifact.measurements import Calibration
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.metrics import ClassCounts, Evaluation
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.train.checkpoints import load_run_file
from opal_deploy.train.recipe import TrainOptions
from opal_deploy.train.resume import check_same_run, parse_evaluation
from opal_deploy.train.run_directory import EpochRecord, TrainRunDirectory


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
        splits = {"validation": self.val, "test": self.test}
        shares = [f"{name} accuracy {each.accuracy:.2%}" for name, each in splits.items() if each is not None]
        return f"<TrainResult {self.best}: epoch {self.best_epoch} of {self.epochs[-1].epoch}, {', '.join(shares)}>"

    def to_dict(self) -> dict[str, Any]:
        """Return paths and metrics as plain values for JSON, without the configuration."""
        paths = {"best": str(self.best), "last": str(self.last)}
        document = {**asdict(self), **paths, "calibration": self.calibration.to_dict()}
        del document["config"]
        return document


def load_finished_result(
    run_dir: TrainRunDirectory, run_config: dict[str, Any], options: TrainOptions, epochs: int
) -> TrainResult:
    """Return the result of a finished run.

    Args:
        run_config: see `check_same_run`.
        epochs: the number of epochs that was asked for.

    Raises:
        UsageError: the directory holds another run, or one with another number of epochs.
    """
    best, last = load_run_file(run_dir.best), load_run_file(run_dir.last)
    # processes and precision matter only to further steps
    check_same_run(run_dir, last, {key: run_config[key] for key in ("options", "fingerprint", "start")})
    done = last["metrics"].get("epoch")
    was_stopped = options.minutes is not None or options.stops_after(done, best["metrics"]["epoch"])
    if done != epochs and not (done < epochs and was_stopped):
        raise UsageError(
            f"{run_dir.root}: the run is finished after {done} epochs and cannot be extended to {epochs}; "
            "give another --out, or --overwrite"
        )
    metrics = best["metrics"]
    test = parse_evaluation(metrics, "test") if "test_loss" in metrics else None
    val = parse_evaluation(metrics, "val")
    calibration = Calibration(**best["calibration"])
    # absent in runs of earlier versions
    classes = [ClassCounts(**each) for each in read_json(run_dir.summary).get("classes", [])]
    records, config = run_dir.read_epochs(), best["training"]
    rates = [*describe_supported_rates(val.risk or {}, Baseline.from_dict(best.get("baseline") or {}))]
    return TrainResult(
        run_dir.best, metrics["epoch"], records, val, test, calibration, run_dir.last, config, classes, rates
    )
