"""Options and inputs that several benchmarks read alike."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import emit_line
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.bench.record import Measurement
    from opal_deploy.pipeline.discover import Item

Images = Annotated[list[str], typer.Argument(help="Photographs: folders, files, globs, or - for a list on stdin.")]
Json = Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Write the measurements to stdout, one line of JSON each.")]
Out = Annotated[Path | None, typer.Option(help="Add the measurements to this file, one line of JSON each.")]


def deliver(measurement: Measurement, out: Path | None, *, as_json: bool) -> None:
    """Hand one measurement on as soon as there is one: what was measured survives whatever stops the next."""
    from opal_deploy.bench.record import append

    if out is not None:
        append(out, measurement)
    if as_json:
        emit_line(measurement.to_line())


def find_items(images: list[str], limit: int) -> list[Item]:
    """At most `limit` pictures of what the command line names.

    Raises:
        UsageError: there are none.
    """
    from opal_deploy.pipeline.discover import Skipped, check_inputs, discover

    check_inputs(images)
    items = list(itertools.islice(discover(images, Skipped(), sys.stdin), limit))
    if not items:
        raise UsageError("no images found")
    return items
