"""JSON schemas (draft 2020-12) of the documents that other programs read: at present the record."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Literal, get_args

Kind = Literal["record"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def schema_text(kind: Kind = "record") -> str:
    """Return the schema as JSON text; the kind `record` is a line of results.jsonl."""
    return resources.files(__name__).joinpath(f"{kind}.json").read_text(encoding="utf-8")


def json_schema(kind: Kind = "record") -> dict[str, Any]:
    """Return the parsed schema, a new object each time."""
    document: dict[str, Any] = json.loads(schema_text(kind))
    return document
