"""The public `evaluate_model`, which `opal-deploy evaluate` calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from opal_deploy.errors import UsageError, require
from opal_deploy.logs import Log, log_line

if TYPE_CHECKING:
    from opal_deploy.evaluation.result import ModelEvaluation
    from opal_deploy.inference.api import Model
    from opal_deploy.logs import Progress

    Source = str | os.PathLike[str] | Model

Split = Literal["test", "val", "train", "all"]


class EvaluateKeywords(TypedDict, total=False):
    """The keywords of `evaluate_model`, for its two signatures."""

    dataset: str | None
    partition: int
    skip_missing: bool
    split: Split
    boxes: bool
    parts: bool | None
    annotations: str | os.PathLike[str] | None
    target_error: float | None
    faithfulness: bool
    limit: int
    fill: Sequence[str] | None
    seed: int
    device: str
    threads: int | None
    batch: int
    out: str | os.PathLike[str] | None
    overwrite: bool
    record: bool
    log: Log
    progress: Progress | None


@overload
def evaluate_model(  # type: ignore[overload-overlap]  # a str is a sequence of str, and means one path
    model: Source, data: str | os.PathLike[str], **options: Unpack[EvaluateKeywords]
) -> ModelEvaluation: ...


@overload
def evaluate_model(
    model: Sequence[Source], data: str | os.PathLike[str], **options: Unpack[EvaluateKeywords]
) -> list[ModelEvaluation]: ...


def evaluate_model(
    model: Source | Sequence[Source],
    data: str | os.PathLike[str],
    *,
    dataset: str | None = None,
    partition: int = 1,
    skip_missing: bool = False,
    split: Split = "test",
    boxes: bool = True,
    parts: bool | None = None,
    annotations: str | os.PathLike[str] | None = None,
    target_error: float | None = None,
    faithfulness: bool = False,
    limit: int = 100,
    fill: Sequence[str] | None = None,
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    batch: int = 16,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    record: bool = False,
    log: Log = log_line,
    progress: Progress | None = None,
) -> ModelEvaluation | list[ModelEvaluation]:
    """Measure accuracy and, for a model with prototypes, the quality of its explanations on a data set.

    Does what `opal-deploy evaluate` does, with options of the same names; prints nothing.

    Args:
        model: an ONNX file, engine or checkpoint, or a model that `load` returned; or a sequence of them, which are
            compared.
        data: a data set as `train_model` takes it, with the model's classes.
        dataset: the data set's name; None: recognized by its files.
        partition: number of the official partition (DTD, SUN-397), 1 ... 10.
        skip_missing: leave out images that the data set's lists name and that are not there.
        split: the images to measure; `all` for a folder of images that were kept from training as a whole.
        boxes: crop to the data set's boxes.
        parts: measure on part locations; None: where the data set has them.
        annotations: COCO file with the boxes that evidence should lie in; None: the data set's own boxes or masks.
        target_error: choose a threshold of the margin with which at most this share of predictions is wrong, 0 ... 1.
        faithfulness: remove evidence cells, and others as controls, and measure how predictions change.
        limit: images that faithfulness is measured on.
        fill: what removed cells are replaced by: `blur`, `mean`, `noise`; None: each in turn.
        seed: of the noise and the random cells.
        device: `auto`, `cpu`, `cuda` or `cuda:1`; a loaded model stays where it is.
        threads: of the runtime on the CPU; None: as many as this process may use.
        batch: images a forward pass.
        out: folder for evaluation.json, tables and plots; None writes no files.
        overwrite: replace an earlier evaluation in `out`.
        record: keep what was measured in the model's own file, whose digest changes; with split `val` also the
            temperature of calibrated probabilities, which is fitted for a model that has none.
        log: called with each line that the command would print; by default they go to the logger `opal_deploy`.
        progress: called with images done, in all (None while unknown), and a note on what is being done.

    Returns:
        What was measured; of a sequence of models a list in their order.

    Raises:
        MissingExtra: PyTorch, scikit-learn or Matplotlib is not installed.
        UsageError: data, models and options do not fit together, or an image cannot be used. Messages name options as
            the command does (`--target-error`).
    """
    for package in ("torch", "sklearn", "matplotlib"):
        require(package, "train", "evaluation", pip_name={"sklearn": "scikit-learn"}.get(package))
    from opal_deploy.evaluation.inputs import EvaluateOptions, EvaluationTarget, parse_baselines
    from opal_deploy.evaluation.measure import measure_models
    from opal_deploy.inference.api import Model
    from opal_deploy.logs import no_progress

    is_one = isinstance(model, str | os.PathLike | Model)
    models = [model] if isinstance(model, str | os.PathLike | Model) else list(model)
    if not models:
        raise UsageError("no model to evaluate; give a path, a loaded model, or several of them")
    options = EvaluateOptions(
        dataset=dataset,
        partition=partition,
        skip_missing=skip_missing,
        split=split,
        boxes=boxes,
        parts=parts,
        annotations=None if annotations is None else Path(annotations),
        seed=seed,
        device=device,
        threads=threads,
        batch=batch,
        faithfulness=faithfulness,
        limit=limit,
        baselines=parse_baselines(fill),
        target_error=target_error,
    )
    results = measure_models(
        [EvaluationTarget.of(each) for each in models],
        Path(data),
        options,
        out=None if out is None else Path(out),
        overwrite=overwrite,
        record=record,
        log=log,
        report=progress or no_progress,
    )
    return results[0] if is_one else results
