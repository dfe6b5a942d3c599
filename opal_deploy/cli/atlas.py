"""`opal-deploy atlas`: the training patches that each slot stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.api.options import AtlasOptions
from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.options import ModelOption
from opal_deploy.errors import ExitCode

if TYPE_CHECKING:
    from opal_deploy.api.atlas import CreatedAtlas

# findings of each kind printed on a terminal; atlas.json has all
_LISTED_FINDINGS = 5


def atlas(
    data: Annotated[
        Path, typer.Argument(help="Data set as for `train`, or any folder or archive with a folder per class.")
    ],
    options: AtlasOptions,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write counts and findings to stdout as JSON.")] = False,
) -> None:
    """Collect the training patches with the strongest evidence for each class and slot.

    `explain --atlas` shows them next to an image's own patches. Slots with problems are listed as findings.
    """
    from opal_deploy.api.atlas import create_atlas

    with progress("images") as advance:
        created = create_atlas(data, model, **replace(options, log=print_message, progress=advance).keywords())
    _print_summary(created)
    if as_json:
        print_json(created.to_dict())
    if created.counts.failed:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)


def _print_summary(created: CreatedAtlas) -> None:
    from opal_deploy.api.atlas import explain_unused
    from opal_deploy.visualization.atlas.entries import FINDING_KINDS

    atlas, counts = created.atlas, created.counts
    unused = "" if counts.used == counts.images else f" ({explain_unused(counts)})"
    print_message(
        f"{counts.images:,} images in {created.seconds:.1f} s{unused}: "
        f"{atlas.count_patches():,} patches of {len(atlas.entries):,} slots"
    )
    for line in counts.first_failures:
        print_message(one_line(f"  {line}"))
    total = sum(atlas.cells)
    most = max(range(len(atlas.cells)), key=lambda cell: (atlas.cells[cell], -cell))
    row, col = divmod(most, atlas.model["grid"][1])
    share, even = atlas.cells[most] / total, 1 / len(atlas.cells)
    print_message(f"Most frequent cell: {row}, {col}, chosen in {share:.1%} of all cases (even share: {even:.1%})")
    if wrong := atlas.count_wrong():
        print_message(f"Wrong predictions: {wrong:,}; atlas.html marks the patches of these images")
    if not atlas.findings:
        print_message("Findings: none")
    for kind, about in FINDING_KINDS.items():
        found = [finding for finding in atlas.findings if finding.kind == kind]
        if found:
            print_message(f"{'To do' if about.actionable else 'Noted'}: {len(found):,} {about.title}. {about.advice}")
        for finding in found[:_LISTED_FINDINGS]:
            print_message(one_line(f"  {finding.message}"))
        if len(found) > _LISTED_FINDINGS:
            print_message(f"  and {len(found) - _LISTED_FINDINGS:,} more in atlas.json")
    print_message(f"Atlas: {atlas.root}")
