"""Records: the answer or the error of one image, as a line of results.jsonl and as `Model.explain` returns it.

`record` defines a record's fields and builds it from a model's outputs; `names` makes text of any file name; `schema`
holds the published JSON schema. `opal_deploy.inference.run.results` writes records and reads them back,
`opal_deploy.auditing` compares them. `tables` (CSV, Parquet, pandas) and `converters` (COCO, Label Studio) convert
them.
"""

from __future__ import annotations

from opal_deploy.records.converters import label_config, to_coco, to_label_studio
from opal_deploy.records.tables import to_pandas

__all__ = ["label_config", "to_coco", "to_label_studio", "to_pandas"]
