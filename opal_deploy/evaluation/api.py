"""Evaluate models: the public `evaluate_model`, and its options, which `opal-deploy evaluate` takes too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from opal_deploy.errors import require
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import CropToBoxes, DatasetName, Device, Option, Options, StrPath, Threads, keywords

if TYPE_CHECKING:
    from opal_deploy.api.model import Model
    from opal_deploy.evaluation.measure import ModelEvaluation

Split = Literal["test", "val", "train", "all"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options):
    """Options of an evaluation."""

    dataset: DatasetName = None
    split: Annotated[Split, Option("Images to measure; `all` for a folder that was not used in training.")] = "test"
    boxes: CropToBoxes = True
    parts: Annotated[
        bool,
        Option("Consistency, stability, part purity and the pointing game on parts, where the data set has them.",
               flag="--parts/--no-parts"),
    ] = True  # fmt: skip
    annotations: Annotated[
        StrPath | None,
        Option("COCO file with object boxes for the pointing game.",
               default="the data set's boxes or masks", cli=Path),
    ] = None  # fmt: skip
    faithfulness: Annotated[bool, Option("Measure what removing the evidence's cells changes.")] = False
    attack_outside: Annotated[
        bool, Option("Change pixels outside the boxes, at random and by an attack. For checkpoints.")
    ] = False
    attack_margin: Annotated[int, Option("Pixels around each box that must not change.", min=0)] = 10
    randomise: Annotated[
        bool, Option("Shuffle weights from the top, and see whether the evidence loses its hits. For checkpoints.")
    ] = False
    interventions: Annotated[bool, Option("Compare the evidence with taking parts away. For generated creatures.")] = (
        False
    )
    limit: Annotated[int, Option("Images for --faithfulness and the options after it, evenly over classes.", min=1)] = (
        100
    )
    device: Device = "auto"
    threads: Threads = None
    batch: Annotated[int, Option("Batch size.", min=1)] = 16
    record: Annotated[
        bool,
        Option(
            "Store the figures in the model's file, for `inspect` and `infer --explain`. With --split val also the "
            "baseline for `drift` and --unknown, and, if the model has none, a temperature for calibrated "
            "probabilities. Changes the file's digest."
        ),
    ] = False
    log: Log = log_line  # receives the lines that the command prints
    progress: ProgressChoice | None = None  # receives the number of images done and in all


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
