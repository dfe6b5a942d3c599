"""JSON schemas (draft 2020-12) of what programs read."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Literal, get_args

Kind = Literal["record"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def schema_text(kind: Kind = "record") -> str:
    """The document of `kind`: `record` is a line of results.jsonl."""
    return resources.files(__name__).joinpath(f"{kind}.json").read_text(encoding="utf-8")


def json_schema(kind: Kind = "record") -> dict[str, Any]:
    """The same, parsed; a new object each time."""
    document: dict[str, Any] = json.loads(schema_text(kind))
    return document
