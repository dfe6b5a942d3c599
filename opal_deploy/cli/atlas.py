"""`opal-deploy atlas`: the training patches that each slot stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.api.options import AtlasOptions
from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.cli.options import ModelOption
from opal_deploy.errors import ExitCode


def atlas(
    data: Annotated[
        Path, typer.Argument(help="Data set as for `train`, or any folder or archive with a folder per class.")
    ],
    options: AtlasOptions,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write counts to stdout as JSON.")] = False,
) -> None:
    """Collect the training patches with the strongest evidence for each class and slot.

    `explain --atlas` shows them next to an image's own patches.
    """
    from opal_deploy.api.atlas import create_atlas

    with progress("images") as advance:
        created = create_atlas(data, model, **replace(options, log=print_message, progress=advance).keywords())
    made = created.atlas
    failed = f", {made.data['failed']:,} failed" if made.data["failed"] else ""
    print_message(
        f"{made.data['images']:,} images in {created.seconds:.1f} s{failed}: {made.count_patches():,} patches of "
        f"{len(made.entries):,} slots"
    )
    if wrong := made.count_wrong():
        print_message(f"Wrong predictions: {wrong:,}; patches of these images are left out")
    print_message(f"Atlas: {made.root}")
    if as_json:
        print_json(created.to_dict())
    if made.data["failed"]:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)
