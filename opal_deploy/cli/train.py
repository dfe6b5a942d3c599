"""`opal-deploy train`: from labelled images to a checkpoint."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opal_deploy.cli.console import print_line, print_message, progress
from opal_deploy.errors import ExitCode
from opal_deploy.train.options import TrainOptions

if TYPE_CHECKING:
    from opal_deploy.train.run_directory import TrainResult


def train(
    data: Annotated[
        Path,
        typer.Argument(help="Data set folder as unpacked, or DATA/<class>/*.jpg, or DATA/train/<class> ..."),
    ],
    options: Annotated[Mapping[str, Any], TrainOptions],
) -> None:
    """Train an OPAL network, or a classifier to compare it with, on labelled images.

    Several GPUs: torchrun --nproc-per-node 4 -m opal_deploy train DATA ...
    """
    from opal_deploy.train.api import is_main_process, train_model

    try:
        with progress("training") as advance:
            result = train_model(data, **options, log=print_line, progress=advance)
    except KeyboardInterrupt:
        if is_main_process():
            print_message(f"Interrupted; resume with: {_format_resume_command()}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if is_main_process():
        _print_result(result)


def _format_resume_command() -> str:
    """Return the command that resumes this run, as a shell takes it."""
    name, *arguments = sys.argv
    kept = [argument for argument in arguments if argument not in ("--overwrite", "--resume")]
    return shlex.join([Path(name).name, *kept, "--resume"])


def _print_result(result: TrainResult) -> None:
    from opal_deploy.evaluation.metrics import format_classes

    for line in format_classes(result.classes):
        print_message(line)
    last = result.epochs[-1].epoch
    kinds = {"out-of-fold": "accuracy out of fold", "held-out": "validation accuracy before it saw all images"}
    kind = kinds.get(result.calibration.split, "validation accuracy")
    best = f"epoch {result.best_epoch}" if result.best_epoch else "the fitted head on the frozen network"
    print_message(f"Best: {best} ({kind} {result.val.accuracy:.1%})")
    if result.best_epoch == 0 < last:
        print_message(
            f"Fine-tuning gained nothing on the {result.val.images} validation images, so the fitted head is kept"
        )
    if result.best_epoch == last > 0:
        print_message(f"The last epoch was the best: more may help (--resume --epochs {2 * last})")
    if result.test is None:
        print_message("Test: the data set has no test images")
    else:
        collapse = result.test.spatial_prototype_collapse
        print_message(
            f"Test accuracy: {result.test.accuracy:.1%} on {result.test.images} images"
            + ("" if collapse is None else f", spatial prototype collapse {collapse:.1%}")
        )
    if (others := result.without_copies) is not None:
        print_message(f"Without near copies of training images: {others.accuracy:.1%} on {others.images} images")
    print_message(f"Calibration: {result.calibration.describe()}")
    for line in result.rates:
        print_message(line)
    print_message(str(result.best))
    if result.config["data"]["crop"] == "boxes":
        print_message("Trained on images cropped to boxes: give infer the boxes of its images too, with --boxes FILE")
    print_message(f"Next: opal-deploy export {result.best}")
