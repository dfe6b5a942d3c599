"""`opal-deploy schema`: the JSON schema of the records."""

from __future__ import annotations

from typing import Annotated

import typer

from opal_deploy.cli.console import print_json_line
from opal_deploy.errors import UsageError


def schema(
    kind: Annotated[str, typer.Option(help="record: a line of results.jsonl, and what Model.explain returns.")] = (
        "record"
    ),
) -> None:
    """Write the JSON schema (draft 2020-12) of what opal-deploy writes to stdout."""
    from opal_deploy.records.schema import KINDS, schema_text

    for known in KINDS:
        if kind == known:
            print_json_line(schema_text(known).rstrip("\n"))
            return
    raise UsageError(f"--kind {kind!r}: expected {' or '.join(KINDS)}")
