"""Records: the answer or the error of one image, a line of results.jsonl.

`record` defines and builds them, `names` encodes names of files, record.json is the published JSON schema (draft
2020-12); `tables` and `converters` convert them to CSV, Parquet, pandas, COCO and Label Studio.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from opal_deploy.records.converters import label_config, to_coco, to_label_studio
from opal_deploy.records.tables import to_pandas

__all__ = ["json_schema", "label_config", "schema_text", "to_coco", "to_label_studio", "to_pandas"]


def schema_text() -> str:
    """Return the JSON schema of a record as JSON text."""
    return resources.files(__package__).joinpath("record.json").read_text(encoding="utf-8")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a record, parsed; a new object each time."""
    document: dict[str, Any] = json.loads(schema_text())
    return document
