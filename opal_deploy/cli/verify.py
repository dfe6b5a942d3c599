"""`opal-deploy verify`: check a model against its test vectors, or recorded explanations against their model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.auditing.options import VerifyOptions
from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.errors import ExitCode, VerificationError


def verify(
    target: Annotated[
        Path, typer.Argument(help="Exported model; results.jsonl of `infer` or its folder; a .json answer of `serve`.")
    ],
    options: VerifyOptions,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            help="Results: the images as for `infer`; needed for archives. Default: found by name.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the outcome to stdout as JSON.")] = False,
) -> None:
    """Check a model, or recorded explanations.

    For a model: checks its digest and runs its test vectors on this machine, without the checkpoint or PyTorch.
    For results: computes a sample of the records again from model and images, and counts all records. --public-key
    checks all signatures, even without --model. Exit code 4: a record differs, is missing or repeated, or has no
    valid signature. Exit code 3: nothing is wrong, but some images to check are missing.
    """
    from opal_deploy.auditing.verify import verify as verify_target

    with progress("records") if options.model is not None else nullcontext() as advance:
        options = replace(options, images=tuple(images or ()), log=print_message, progress=advance)
        done = verify_target(target, **options.keywords())
    if as_json:
        print_json(done.document)
    if done.failure:
        raise VerificationError(done.failure)
    if done.not_checked:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)
