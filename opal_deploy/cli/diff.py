"""`opal-deploy diff`: what changed between two models, or two results of the same images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.auditing.options import DiffOptions
from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.errors import VerificationError

if TYPE_CHECKING:
    from opal_deploy.auditing.diff import DiffReport

# changes printed
_LISTED = 10


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A model; or results.jsonl, or its folder.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same, to compare with A.")],
    options: DiffOptions,
    images: Annotated[
        list[str] | None, typer.Argument(help="Images to compare models on, as for `infer`.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the comparison to stdout as JSON.")] = False,
) -> None:
    """Compare two models, or two runs on the same images; largest changes first.

    Compares predictions, cells and contributions image by image. Use it before replacing a model.
    """
    from opal_deploy.auditing.diff import diff as compare

    with progress("images") as advance:
        options = replace(options, images=tuple(images or ()), log=print_message, progress=advance)
        report = compare(before, after, **options.keywords())
    _print_report(report)
    if options.out is not None:
        print_message(f"Page: {options.out}")
    if as_json:
        print_json({"before": str(before), "after": str(after), "tolerance": options.tolerance, **report.to_dict()})
    if options.fail_on is not None and report.has(options.fail_on):
        raise VerificationError(f"{after}: {report.changed} images changed, some by {options.fail_on} or more")


def _print_report(report: DiffReport) -> None:
    print_message(f"{report.changed} of {report.paired} images changed")
    for kind, count in report.kinds.items():
        if count and kind != "same":
            print_message(f"  {kind}: {count}")
    if report.slots:
        print_message(f"  {report.describe_slots()}")
        print_message(f"  largest change of a contribution: {report.largest_contribution_change:.2g}")
    for count, text in (
        (report.only_before, "images only in A"),
        (report.only_after, "images only in B"),
        (report.unpaired, "records without a name, not compared"),
        (report.image_changed, "image files differ in B; their changes say nothing about the models"),
    ):
        if count:
            print_message(f"{count} {text}")
    for change, _, _ in report.worst[:_LISTED]:
        print_message(one_line(f"{change.kind}: {change.image}: {change}"))
