"""The public `train_model`, which `opal-deploy train` calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.artifact.files import model_kind
from opal_deploy.datasets.background import list_background
from opal_deploy.errors import UsageError, require
from opal_deploy.logs import WarningLine, as_progress
from opal_deploy.model.network_names import check_weights
from opal_deploy.options import StrPath, keywords
from opal_deploy.train.balance import balance_warnings
from opal_deploy.train.options import OUTSIDE, TrainOptions, load_recipe, resolve
from opal_deploy.train.run_directory import TrainResult, TrainRunDirectory, read_keep_off

if TYPE_CHECKING:
    from opal_deploy.datasets.samples import DataSet


@keywords(TrainOptions, given_only=True)
def train_model(data: StrPath, options: Mapping[str, Any]) -> TrainResult:
    """Train an OPAL network, or a classifier to compare it with, on labelled images.

    Does what `opal-deploy train` does and prints nothing. Omitted options are the recipe's. After a KeyboardInterrupt,
    the same call with `resume=True` continues the run. Where processes are spawned (macOS, Windows), `workers` above 0
    needs the call to be under `if __name__ == "__main__":`.

    Args:
        data: a data set's folder as unpacked, or a folder with one folder per class, optionally below train/ (val/,
            test/). `log` receives each line that the command prints; `progress` receives the images done, all images
            (None while unknown) and a note.

    Returns:
        Checkpoints, metrics by split, and one record per epoch.

    Raises:
        MissingExtra: a package of the extra `train` is not installed.
        UsageError: data or options are impossible, or `out` holds a run. Messages name options as the command does.
        StoppedEarly: the loss is not finite, or disk or memory are full; the run can be resumed.
    """
    for package in ("torch", "torchvision", "matplotlib", "tomli_w", "lightning_fabric"):
        require(package, "train", "training", pip_name=package.replace("_", "-"))
    root = Path(data)
    run_dir = TrainRunDirectory(Path(options.get("out") or Path("runs") / root.resolve().name))
    recipe = os.fspath(options.get("recipe") or "grounded")
    if options.get("resume") and not options.get("recipe") and run_dir.recipe.is_file():
        # a run goes on as it began, even where the default recipe has changed since
        recipe = str(run_dir.recipe)
    resolved = replace(resolve(load_recipe(recipe), options), out=run_dir.root)
    check_files(resolved, run_dir)
    labelled = _read(root, resolved)
    # takes seconds, since it imports torch: after all that can be refused without
    from opal_deploy.train.loop import fit
    from opal_deploy.train.machine import is_main_process

    # torchrun starts several processes; only one reports
    if is_main_process():
        for line in [*labelled.warnings, *balance_warnings(labelled, weighted=resolved.class_weights == "balanced")]:
            resolved.log(WarningLine(f"warning: {line}"))
        resolved.log(f"recipe {recipe}; read as {labelled.describe()}")
    return fit(labelled, resolved)


def _read(root: Path, options: TrainOptions) -> DataSet:
    from opal_deploy.datasets.registry import read_dataset

    labelled = read_dataset(
        root, options.dataset, partition=options.partition, skip_missing=options.skip_missing,
        progress=as_progress(options.progress),
    )  # fmt: skip
    return labelled if options.boxes else labelled.without_crops()


def check_files(options: TrainOptions, run_dir: TrainRunDirectory) -> None:
    """Check the files that options name and the run directory; changes nothing and imports no torch.

    Raises:
        UsageError: a file is missing, or the directory holds a run or cannot be written.
        MissingExtra: a package is not installed.
    """
    if options.tensorboard:
        require("tensorboard", "tensorboard", "--tensorboard")
    if not options.resume and not options.overwrite:
        run_dir.check_free()
    run_dir.check_writable()
    if options.resume and run_dir.is_finished:
        return  # a finished run trains nothing, and the files may be gone
    if options.start_from is not None:
        path = Path(options.start_from)
        if model_kind(path) != "checkpoint":
            raise UsageError(
                f"--start-from {path}: only checkpoints can be trained; give the .pt file that it came from"
            )
        if not path.is_file():
            raise UsageError(f"--start-from {path}: no such checkpoint")
    elif (weights := options.weights_name) is not None:
        check_weights(options.backbone, weights)
    if options.background is not None:
        list_background(options.background)
    if options.keep_off not in (None, OUTSIDE):
        read_keep_off(options.keep_off)
