"""`opal-deploy evaluate`: accuracy and explanation metrics of a model, in the runtime that will run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.console import print_json, print_line, progress
from opal_deploy.errors import ExitCode
from opal_deploy.evaluation.api import EvaluateOptions, evaluate_model


def evaluate(
    data: Annotated[Path, typer.Argument(help="A data set as `train` takes it.")],
    model: Annotated[Path, typer.Option(help="Exported model or checkpoint.")],
    options: EvaluateOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures to stdout as JSON.")] = False,
) -> None:
    """Measure accuracy and, for models with prototypes, the quality of their explanations on a data set.

    Takes checkpoints and exported models; the difference of both shows what deployment costs.
    """
    with progress("evaluating") as advance:
        result = evaluate_model(model, data, **replace(options, log=print_line, progress=advance).keywords())
    if as_json:
        print_json(result.to_dict())
    if result.left_out:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)
