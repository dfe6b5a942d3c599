"""`opal-deploy bench diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.bench.options import Json
from opal_deploy.cli.console import print_json, print_message

if TYPE_CHECKING:
    from opal_deploy.bench.diff import FigureChange, MeasurementDiff

# of each list but the regressions; --json has all
_MAX_LINES = 20


def diff(
    old: Annotated[Path, typer.Argument(help="Measurements before: a file of `--out`, or a folder of *.jsonl.")],
    new: Annotated[Path, typer.Argument(help="Measurements after.")],
    tolerance: Annotated[
        float, typer.Option(min=0, help="Changes up to this many per cent are never called one.")
    ] = 3.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Measurements that only one side has count as regressions.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List what became slower or larger by more than the noise; exit with 1 if anything did.

    Here, exit code 1 is not a bug of opal-deploy but a regression, and its last line says so. Changes in measurements
    that are marked noisy or throttled are listed as doubtful and do not fail.
    """
    from opal_deploy.bench.diff import compare_measurements
    from opal_deploy.bench.measurement import read_measurements

    result = compare_measurements(read_measurements([old]), read_measurements([new]), tolerance / 100)
    _print_diff(result)
    if as_json:
        print_json(result.to_dict())
    reasons = []
    if worse := len(result.with_verdict("regression")):
        reasons.append(f"{worse} regression{'s' if worse > 1 else ''} beyond the noise")
    if strict and result.missing:
        reasons.append(f"{result.missing} not in both (--strict)")
    if reasons:
        print_message(f"failed: {', '.join(reasons)}; exit code 1")
        raise typer.Exit(1)
    print_message("no regression beyond the noise" if result.changes else "nothing to compare: no figure is in both")


def _print_diff(result: MeasurementDiff) -> None:
    if result.machines:
        print_message("DIFFERENT MACHINES: what follows compares machines as much as software")
        _print_lines(result.machines)
    if result.software:
        print_message("versions differ:")
        _print_lines(result.software)
    if result.repeated:
        print_message("measured more than once; the last one counts:")
        _print_lines(result.repeated)
    _print_changes("REGRESSIONS", result.with_verdict("regression"), limit=None)
    _print_changes("doubtful, since a measurement is marked", result.with_verdict("doubtful"))
    _print_changes("improvements", result.with_verdict("improvement"))
    for title, lines in (
        ("only in OLD", result.only_old),
        ("only in NEW", result.only_new),
        ("not comparable", result.not_comparable),
    ):
        if lines:
            print_message(f"{title} ({len(lines)}):")
            _print_lines(lines)
    print_message(
        f"unchanged within the noise: {len(result.with_verdict('unchanged'))} of {len(result.changes)} figures"
    )


def _print_changes(title: str, changes: tuple[FigureChange, ...], limit: int | None = _MAX_LINES) -> None:
    if changes:
        print_message(f"{title} ({len(changes)}):")
        _print_lines([change.describe() for change in changes], limit)


def _print_lines(lines: tuple[str, ...] | list[str], limit: int | None = _MAX_LINES) -> None:
    for line in lines[:limit]:
        print_message(f"  {line}")
    if limit is not None and len(lines) > limit:
        print_message(f"  ... and {len(lines) - limit} more, in --json")
