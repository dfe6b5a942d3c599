"""Records as other programs take them: pandas, COCO, Label Studio."""

from __future__ import annotations

from opal_deploy.pipeline.convert.coco import to_coco
from opal_deploy.pipeline.convert.frames import to_pandas
from opal_deploy.pipeline.convert.label_studio import label_config, to_label_studio

__all__ = ["label_config", "to_coco", "to_label_studio", "to_pandas"]
