"""`opal-deploy schema`: the JSON schema of the records."""

from __future__ import annotations

from opal_deploy.cli.console import print_json_line


def schema() -> None:
    """Write the JSON schema (draft 2020-12) of a record, a line of results.jsonl, to stdout."""
    from opal_deploy.records.schema import schema_text

    print_json_line(schema_text().rstrip("\n"))
