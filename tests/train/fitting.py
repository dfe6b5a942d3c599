"""Runs in tests: `loop.fit` without lines and progress, and the metrics of a network in float32."""

import csv
import json
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


def write_regions(path, boxes):
    """Write a COCO file of (x0, y0, width, height) by image name; return its path."""
    images = [{"id": name, "file_name": name} for name in boxes]
    annotations = [{"image_id": name, "bbox": box} for name, box in boxes.items()]
    path.write_text(json.dumps({"images": images, "annotations": annotations}), encoding="utf-8")
    return path


def evaluate(network, batches):
    """Return the metrics over all batches."""
    return predict(network, batches).compute_metrics()


def read_epochs(out):
    """Return the records in a run's metrics.csv."""
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]
    return [EpochRecord(**{**row, "epoch": int(row["epoch"])}) for row in rows]
