"""`opal-deploy atlas`: the training patches that each slot stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.api.options import AtlasOptions
from opal_deploy.cli.console import print_message, progress
from opal_deploy.cli.options import ModelOption


def atlas(
    options: AtlasOptions,
    data: Annotated[
        Path | None,
        typer.Argument(help="Data set as for `train`, to choose patches from. Default: those that the model keeps."),
    ] = None,
    model: ModelOption = None,
) -> None:
    """Write a page that shows what each slot stands for: the training patches in which it was strongest."""
    from opal_deploy.evaluation.patches import create_atlas

    with progress("images") as advance:
        created = create_atlas(model, **replace(options, data=data, log=print_message, progress=advance).keywords())
    patches = sum(len(row.patches) for row in created.patches.slots)
    print_message(f"Wrote {created.path}: {patches:,} patches of {len(created.patches.slots):,} slots")
