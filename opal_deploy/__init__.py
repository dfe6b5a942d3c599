"""opal-deploy: put OPAL image classifiers, which explain themselves, into production.

>>> import opal_deploy
>>> model = opal_deploy.load("model.onnx")  # doctest: +SKIP
>>> model.predict("bird.jpg").record.prediction.label  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from opal_deploy._version import __version__
from opal_deploy.errors import (
    ArtifactError,
    CheckpointError,
    ImageError,
    MissingExtra,
    OpalError,
    StoppedEarly,
    UsageError,
    VerificationError,
    suggest_attribute,
)

# since 1.29, ONNX Runtime's builds for Linux send names and hashes of models to its makers, unless this is set before
# the import
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from opal_deploy import nn
    from opal_deploy.api.explanation import Explanation, Explanations
    from opal_deploy.api.infer import InferenceRun, run_inference
    from opal_deploy.api.model import Model
    from opal_deploy.api.service import Service
    from opal_deploy.auditing.diff import DiffReport, diff
    from opal_deploy.auditing.drift import DriftReport, find_drift
    from opal_deploy.auditing.inspection import Inspection, inspect
    from opal_deploy.auditing.verify import Verification, verify
    from opal_deploy.editing.api import EditResult, edit_model
    from opal_deploy.evaluation.api import evaluate_model
    from opal_deploy.evaluation.measure import ModelEvaluation
    from opal_deploy.evaluation.patches import CreatedAtlas, create_atlas
    from opal_deploy.export.api import export_engines, export_model, export_triton, export_web, load
    from opal_deploy.export.plan import ExportResult
    from opal_deploy.records.record import Answer, Answered, Failed, Record, Slot, json_schema
    from opal_deploy.records.tables import to_coco, to_pandas
    from opal_deploy.server.app import ModelApp
    from opal_deploy.train.api import train_model
    from opal_deploy.train.run_directory import TrainResult

__all__ = [
    "Answer",
    "Answered",
    "ArtifactError",
    "CheckpointError",
    "CreatedAtlas",
    "DiffReport",
    "DriftReport",
    "EditResult",
    "Explanation",
    "Explanations",
    "ExportResult",
    "Failed",
    "ImageError",
    "InferenceRun",
    "Inspection",
    "MissingExtra",
    "Model",
    "ModelApp",
    "ModelEvaluation",
    "OpalError",
    "Record",
    "Service",
    "Slot",
    "StoppedEarly",
    "TrainResult",
    "UsageError",
    "Verification",
    "VerificationError",
    "__version__",
    "create_atlas",
    "diff",
    "edit_model",
    "evaluate_model",
    "export_engines",
    "export_model",
    "export_triton",
    "export_web",
    "find_drift",
    "inspect",
    "json_schema",
    "load",
    "nn",
    "run_inference",
    "to_coco",
    "to_pandas",
    "train_model",
    "verify",
]

# modules that are imported when one of their names is first used
_LAZY = {
    "evaluation.patches": ("CreatedAtlas", "create_atlas"),
    "auditing.diff": ("DiffReport", "diff"),
    "auditing.drift": ("DriftReport", "find_drift"),
    "auditing.inspection": ("Inspection", "inspect"),
    "auditing.verify": ("Verification", "verify"),
    "editing.api": ("EditResult", "edit_model"),
    "evaluation.api": ("evaluate_model",),
    "evaluation.measure": ("ModelEvaluation",),
    "export.api": ("export_engines", "export_model", "export_triton", "export_web", "load"),
    "export.plan": ("ExportResult",),
    "api.model": ("Model",),
    "api.explanation": ("Explanation", "Explanations"),
    "api.infer": ("InferenceRun", "run_inference"),
    "api.service": ("Service",),
    "records.tables": ("to_coco", "to_pandas"),
    "records.record": ("Answer", "Answered", "Failed", "Record", "Slot", "json_schema"),
    "server.app": ("ModelApp",),
    "train.api": ("train_model",),
    "train.run_directory": ("TrainResult",),
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # numpy and Pillow are imported when an image is explained, not by `opal-deploy --help`
        import importlib

        if name == "nn":
            return importlib.import_module(f"{__name__}.nn")
        for module, names in _LAZY.items():
            if name in names:
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        known = {"load_model": "load", "train": "train_model", "predict": "load(path).predict(images)"}
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{suggest_attribute(name, known)}")


def __dir__() -> list[str]:
    # including the names that are imported when first used
    return sorted({*globals(), *__all__})
