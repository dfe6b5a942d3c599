"""Records as other programs take them: pandas, COCO, Label Studio."""

from __future__ import annotations

from opal_deploy.records.coco import to_coco
from opal_deploy.records.label_studio import label_config, to_label_studio
from opal_deploy.records.tables import to_pandas

__all__ = ["label_config", "to_coco", "to_label_studio", "to_pandas"]
