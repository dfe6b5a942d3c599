"""Evaluate models: the public `evaluate_model`, which `opal-deploy evaluate` calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.errors import require
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.options import StrPath, keywords

if TYPE_CHECKING:
    from opal_deploy.api.model import Model
    from opal_deploy.evaluation.measure import ModelEvaluation


@keywords(EvaluateOptions)
def evaluate_model(model: StrPath | Model, data: StrPath, options: EvaluateOptions) -> ModelEvaluation:
    """Measure accuracy and, for a model with prototypes, the quality of its explanations on a data set.

    Does what `opal-deploy evaluate` does; prints nothing. `model` is an ONNX file, engine or checkpoint, or a model
    that `load` returned, which stays on its device; `data` is a data set as `train_model` takes it, with the model's
    classes.

    Raises:
        MissingExtra: PyTorch or scikit-learn is not installed, or Captum where Grad-CAM is measured.
        UsageError: data, model and options do not fit together, or an image cannot be used.
    """
    for package, pip_name in (("torch", None), ("sklearn", "scikit-learn")):
        require(package, "train", "evaluation", pip_name=pip_name)
    from opal_deploy.evaluation.measure import measure_model

    return measure_model(model, Path(data), options)
