"""Runs in tests: `loop.fit` without lines and progress."""

from dataclasses import replace

from opal_deploy.train import loop
from opal_deploy.train.options import TrainOptions


def small(**options):
    """Return options of a run with random weights and two prototypes per class."""
    return TrainOptions(**{"weights": "none", "prototypes": 2, "device": "cpu", **options})


def fit(data, options, out, **changes):
    """Train into `out`."""
    return loop.fit(data, replace(options, out=out, **{"log": lambda line: None, **changes}))
