"""Records: the answer or the error of one image, a line of results.jsonl.

`record` declares them, `build` makes them from a model's outputs, `lines` writes and reads them, `names` encodes names
of files; `tables` and `converters` convert them to CSV, Parquet, pandas, COCO and Label Studio.
"""

from __future__ import annotations

from opal_deploy.records.converters import label_config, to_coco, to_label_studio
from opal_deploy.records.record import json_schema
from opal_deploy.records.tables import to_pandas

__all__ = ["json_schema", "label_config", "to_coco", "to_label_studio", "to_pandas"]
