"""`opal-deploy drift`: whether a model's answers have shifted since its validation, or since an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.auditing.options import DriftOptions
from opal_deploy.cli.console import one_line, print_json, print_message
from opal_deploy.errors import VerificationError

if TYPE_CHECKING:
    from opal_deploy.auditing.drift import DriftReport

# shifts printed
_LISTED = 10


def drift(
    results: Annotated[Path, typer.Argument(help="results.jsonl of `infer` or `serve --records`, or its folder.")],
    options: DriftOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Write all shifts to stdout as JSON.")] = False,
) -> None:
    """Compare a run's answers with the model's validation images, or with an earlier run; strongest shifts first.

    Compares class shares, cosines and margins, and where each slot looks, how strongly, and what it contributes. A
    shift has a q-value of at most --max-q and an effect of at least --min-effect. Exits with 0 even if there are
    shifts, unless with --fail-on.
    """
    from opal_deploy.auditing.drift import find_drift

    report = find_drift(results, **options.keywords())
    _print_report(report)
    if report.shifts and options.fail_on is None:
        print_message("Exit code 0; for scripts, --fail-on any or --fail-on evidence makes it 4")
    if options.html is not None:
        print_message(f"Page: {options.html}")
    if as_json:
        print_json({"results": str(results), **report.to_dict()})
    if options.fail_on is not None and report.has(options.fail_on):
        raise VerificationError(f"{results}: {len(report.shifts)} shifts since {report.reference}")


def _print_report(report: DriftReport) -> None:
    print_message(f"{report.images:,} images compared with {report.baseline_images:,} of {report.reference}")
    if report.failed:
        print_message(f"{report.failed / (report.failed + report.images):.1%} of all images failed ({report.failed:,})")
    if not report.shifts:
        print_message(
            f"No shift found. {report.images:,} images only show changes of at least {report.smallest_shift:.0%} of "
            "the answers; compare more images to see smaller ones"
        )
    for section, text in report.causes.items():
        print_message(f"{text} (what to do: docs/howto/drift.md, {section})")
    for shift in report.shifts[:_LISTED]:
        print_message(one_line(f"{shift.describe(report.class_names)} (effect {shift.effect:.2f}, q {shift.q:.1g})"))
    if len(report.shifts) > _LISTED:
        print_message(f"and {len(report.shifts) - _LISTED} more; --json lists them")
