"""`opal-deploy demo`: the job on generated creatures, with training or with the model that ships."""

from __future__ import annotations

import secrets
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.console import print_message
from opal_deploy.cli.demo.quick import show_quick
from opal_deploy.cli.demo.steps import Demo
from opal_deploy.cli.demo.whole import WHOLE, show_whole_job
from opal_deploy.errors import ExitCode, UsageError, require


def demo(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Explain new creatures with a trained model: seconds, without PyTorch.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for data, model and explanations. Default: opal-demo, with --quick opal-demo-quick."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help=f"Epochs. Default: {WHOLE.epochs}.")] = None,
    train_per_class: Annotated[
        int | None, typer.Option(min=4, help=f"Images per species to train on. Default: {WHOLE.train_per_class}.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed. Default: 0, with --quick a new one each time.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="ImageNet weights of the backbone as a file; default: random weights.")
    ] = None,
    ort_web: Annotated[
        Path | None,
        typer.Option(help="With --quick: npm's package onnxruntime-web. Default: node_modules/onnxruntime-web."),
    ] = None,
) -> None:
    """Train, export, explain and verify a model on generated creatures, and check that its boxes are right.

    Each step is a command, printed as typed in a shell. Repeat the command to continue an interrupted demo. With
    --quick, nothing is trained.
    """
    _check(quick, epochs, train_per_class, weights, ort_web)
    if quick:
        seed = secrets.randbelow(1 << 31) if seed is None else seed
        show_quick(context, out or Path("opal-demo-quick"), seed, ort_web)
        return
    training = replace(
        WHOLE, epochs=epochs or WHOLE.epochs, train_per_class=train_per_class or WHOLE.train_per_class,
        seed=seed or 0, weights=None if weights is None else str(weights),
    )  # fmt: skip
    try:
        show_whole_job(Demo.open(context, out or Path("opal-demo"), asdict(training), overwrite=overwrite), training)
    except (KeyboardInterrupt, typer.Exit) as stop:
        if isinstance(stop, typer.Exit) and stop.exit_code != ExitCode.INTERRUPTED:
            raise
        print_message(f"Resume the demo with: {_format_own_command()}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _check(
    quick: bool, epochs: int | None, train_per_class: int | None, weights: Path | None, ort_web: Path | None
) -> None:
    """Raise UsageError if options do not fit together, and MissingExtra for a package that is not installed."""
    if quick:
        if epochs or train_per_class or weights:
            raise UsageError("--quick trains nothing; leave out --epochs, --train-per-class and --weights, or --quick")
        require("onnxruntime", "cpu", "opal-deploy demo --quick")
        return
    if ort_web is not None:
        raise UsageError("--ort-web is for the page of --quick; add --quick, or leave it out")
    for package in ("torch", "torchvision", "timm", "matplotlib", "onnx", "onnxscript", "onnxruntime"):
        require(package, "all-cpu", "opal-deploy demo")


def _format_own_command() -> str:
    """Return this call as a shell takes it, without --overwrite: a name on the path, or the program's file."""
    program, *arguments = sys.argv
    name = Path(program).name
    kept = [argument for argument in arguments if argument != "--overwrite"]
    return shlex.join([name if shutil.which(name) else program, *kept])
