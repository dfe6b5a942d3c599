"""Runs in tests: `loop.fit` without lines and progress, and the metrics of a network in float32."""

from dataclasses import replace

from opal_deploy.train import loop
from opal_deploy.train.measure import predict
from opal_deploy.train.options import TrainOptions


def small(**options):
    """Return options of a run with random weights and two prototypes per class."""
    return TrainOptions(**{"weights": "none", "prototypes": 2, "device": "cpu", **options})


def fit(data, options, out, **changes):
    """Train into `out`."""
    return loop.fit(data, replace(options, out=out, **{"log": lambda line: None, **changes}))


def evaluate(network, batches):
    """Return the metrics over all batches."""
    return predict(network, batches).compute_metrics(network.config.class_map)
