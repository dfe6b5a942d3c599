"""The JSON schema (draft 2020-12) of a record, for programs that read them."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def schema_text() -> str:
    """Return the schema as JSON text."""
    return resources.files(__package__).joinpath("record.json").read_text(encoding="utf-8")


def json_schema() -> dict[str, Any]:
    """Return the parsed schema, a new object each time."""
    document: dict[str, Any] = json.loads(schema_text())
    return document
