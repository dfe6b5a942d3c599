"""`opal-deploy infer`: classify images and explain the predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.cli.options import ModelOption
from opal_deploy.errors import ExitCode
from opal_deploy.run.options import InferOptions, handle_signals


def infer(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Folders (with subfolders), files, globs, tar and zip archives, or URLs of them (s3://, gs://, "
            "az://); - or @FILE for a list; with --every videos too."
        ),
    ],
    options: InferOptions,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Also write summary.json to stdout.")] = False,
) -> None:
    """Classify images and explain the predictions: one record per image, in results.jsonl.

    --explain adds overlays with the evidence for each prediction and report.html.
    A run that ended early continues when the same command is given again.
    """
    from opal_deploy.api.infer import run_inference

    with handle_signals(print_message) as interrupt, progress("images") as advance:
        options = replace(options, log=print_message, progress=advance, interrupt=interrupt)
        run = run_inference(images, model, **options.keywords())
    for line in run.lines:
        print_message(line)
    if as_json:
        print_json(run.summary)
    if run.summary["errors"]:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)
