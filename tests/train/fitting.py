"""Runs in tests: `loop.fit` without lines and progress, and the metrics of a network in float32."""

import csv
from dataclasses import replace

from opal_deploy.train import loop
from opal_deploy.train.checkpoints import predict
from opal_deploy.train.options import TrainOptions
from opal_deploy.train.run_directory import EpochRecord


def small(**options):
    """Return options of a run with random weights and two prototypes per class."""
    return TrainOptions(**{"weights": "none", "prototypes": 2, "device": "cpu", **options})


def fit(data, options, out, **changes):
    """Train into `out`."""
    return loop.fit(data, replace(options, out=out, **{"log": lambda line: None, **changes}))


def evaluate(network, batches):
    """Return the metrics over all batches."""
    return predict(network, batches).compute_metrics()


def read_epochs(out):
    """Return the records in a run's metrics.csv."""
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]
    return [EpochRecord(**{**row, "epoch": int(row["epoch"])}) for row in rows]
