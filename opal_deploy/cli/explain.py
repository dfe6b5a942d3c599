"""`opal-deploy explain`: one evidence sheet per image."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from opal_deploy.api.options import ExplainOptions
from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.cli.options import ModelOption
from opal_deploy.errors import ExitCode


def explain(
    images: Annotated[
        list[str], typer.Argument(help="Images: files, folders, globs, archives, or - for a list on stdin.")
    ],
    options: ExplainOptions,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the sheets' content to stdout as JSON.")] = False,
) -> None:
    """Draw an evidence sheet per image: why the model answered, and how close the runner-up was.

    A sheet shows each slot's patch enlarged, its contribution to the answer, and the same for the runner-up.
    """
    from opal_deploy.api.explain import write_sheets

    with progress("sheets") as advance:
        written = write_sheets(images, model, **replace(options, log=print_message, progress=advance).keywords())
    if as_json:
        print_json(written.documents[0] if written.single else written.documents)
    if written.failed:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)
