"""Evaluate models: `evaluate_model`, `evaluate_models`, and the options that they share with `opal-deploy evaluate`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from opal_deploy.errors import UsageError, require
from opal_deploy.logs import Log, Progress, log_line, no_progress
from opal_deploy.options import (
    CropToBoxes,
    DatasetName,
    Device,
    Option,
    Options,
    Partition,
    SkipMissing,
    StrPath,
    Threads,
    keywords,
    parse_rate,
)

if TYPE_CHECKING:
    from opal_deploy.evaluation.result import ModelEvaluation
    from opal_deploy.inference.api import Model

    Source = StrPath | Model

Split = Literal["test", "val", "train", "all"]
Baseline = Literal["blur", "mean", "noise"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options):
    """Options of an evaluation.

    Attributes:
        log: receives the lines that the command prints.
        progress: receives the number of images done and in all.
    """

    dataset: DatasetName = None
    partition: Partition = 1
    skip_missing: SkipMissing = False
    split: Annotated[Split, Option("Images to measure; `all` for a folder that was not used in training.")] = "test"
    boxes: CropToBoxes = True
    parts: Annotated[
        bool | None,
        Option(
            "Prototype consistency, stability and part purity, and the pointing game on parts.",
            flag="--parts/--no-parts",
            default="where the data set has parts",
        ),
    ] = None
    annotations: Annotated[
        StrPath | None,
        Option("COCO file with object boxes for the pointing game.", default="the data set's boxes or masks", cli=Path),
    ] = None
    target_error: Annotated[
        float | None,
        Option(
            "Choose a --min-margin for `infer` that keeps this error rate, such as 5%.",
            cli=str,
            parse=functools.partial(parse_rate, "--target-error"),
        ),
    ] = None
    faithfulness: Annotated[bool, Option("Measure what removing evidence cells changes, and how stable cells are.")] = (
        False
    )
    limit: Annotated[int, Option("Images for --faithfulness, evenly over classes.", min=1)] = 100
    fill: Annotated[
        tuple[Baseline, ...], Option("What replaces removed cells: blur, mean or noise. Repeatable.", cli=list[str])
    ] = BASELINES
    seed: Annotated[int, Option("Seed of the noise and the random cells.", min=0)] = 0
    device: Device = "auto"
    threads: Threads = None
    batch: Annotated[int, Option("Batch size.", min=1)] = 16
    out: Annotated[StrPath | None, Option("Folder for evaluation.json, tables and plots.", cli=Path)] = None
    overwrite: Annotated[bool, Option("Replace the evaluation in --out.")] = False
    record: Annotated[
        bool,
        Option(
            "Store the figures in the model's file, for `inspect` and `infer --explain`. With --split val also the "
            "baseline for `drift` and --unknown, and, if the model has none, a temperature for calibrated "
            "probabilities. Changes the file's digest.",
        ),
    ] = False
    background: Annotated[
        StrPath | None,
        Option(
            "Folder of out-of-distribution images, e.g. empty scenes; with --split val --record they help --unknown "
            "flag similar images. For checkpoints.",
            default="those of training", cli=Path,
        ),
    ] = None  # fmt: skip
    log: Log = log_line
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_error is not None and not 0 < self.target_error < 1:
            raise UsageError(f"target_error {self.target_error}: expected a share between 0 and 1, such as 0.05")
        # each baseline once
        object.__setattr__(self, "fill", tuple(dict.fromkeys(self.fill)))


@keywords(EvaluateOptions)
def evaluate_model(model: Source, data: StrPath, options: EvaluateOptions) -> ModelEvaluation:
    """Measure accuracy and, for a model with prototypes, the quality of its explanations on a data set.

    Does what `opal-deploy evaluate` does; prints nothing. `model` is an ONNX file, engine or checkpoint, or a model
    that `load` returned, which stays on its device; `data` is a data set as `train_model` takes it, with the model's
    classes.

    Raises:
        MissingExtra: PyTorch, scikit-learn or Matplotlib is not installed.
        UsageError: data, model and options do not fit together, or an image cannot be used.
    """
    return _evaluate([model], data, options)[0]


@keywords(EvaluateOptions)
def evaluate_models(models: Sequence[Source], data: StrPath, options: EvaluateOptions) -> list[ModelEvaluation]:
    """Measure several models on one data set, and compare them; see `evaluate_model`."""
    return _evaluate(models, data, options)


def _evaluate(models: Sequence[Source], data: StrPath, options: EvaluateOptions) -> list[ModelEvaluation]:
    for package in ("torch", "sklearn", "matplotlib"):
        require(package, "train", "evaluation", pip_name={"sklearn": "scikit-learn"}.get(package))
    from opal_deploy.evaluation.inputs import EvaluatedModel
    from opal_deploy.evaluation.measure import measure_models

    if not models:
        raise UsageError("no model to evaluate; give at least one path or loaded model")
    return measure_models([EvaluatedModel.of(model) for model in models], Path(data), options)
