"""Models and images of an evaluation, checked before anything is measured."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.metadata import Metadata, check_all_outputs
from opal_deploy.datasets import cub
from opal_deploy.datasets.checks import read_background
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, Sample, find_root, pluralize
from opal_deploy.errors import UsageError, require
from opal_deploy.evaluation.annotations import Annotations, annotate, has_creatures
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.logs import WarningLine, as_progress


@dataclass(frozen=True)
class EvaluationInputs:
    """The images of one split with their annotations."""

    data: DataSet
    samples: list[Sample]
    part_locations: PartLocations | None  # CUB's part locations; None for other data sets or with --no-parts
    annotations: Annotations  # one per sample, for the pointing game; may be empty
    background: list[Sample]  # out-of-distribution images, for the OOD score; may be empty


def read_inputs(data: Path, path: Path, metadata: Metadata, options: EvaluateOptions) -> EvaluationInputs:
    """Read a data set's split with the annotations that the options and the data set allow; log warnings.

    Args:
        path, metadata: of the model.

    Raises:
        UsageError: the data set does not fit the options or the model, or annotations are missing or damaged.
    """
    # classes with a few images cannot be split
    needs_validation = options.split in ("train", "val")
    data_set = read_dataset(
        data, options.dataset,
        needs_validation=needs_validation, progress=as_progress(options.progress),
    )  # fmt: skip
    options.log(f"read as {data_set.describe()}")
    samples = data_set.select(options.split)
    if not samples:
        raise UsageError(
            f"{data_set.root}: no {options.split} images; give --split all for all {len(data_set.select('all')):,} if "
            "none was used in training, or --split val for those that `train` sets aside"
        )
    check_classes(path, list(metadata.class_names), data_set)
    trained_on = _describe_trained_images(path, metadata.training, data_set, options.split)
    crop_mismatch = describe_crop_mismatch(path, metadata.crop, data_set, boxes=options.boxes)
    for line in filter(None, (*data_set.warnings, trained_on, crop_mismatch)):
        options.log(WarningLine(f"warning: {line}"))
    if options.interventions and not has_creatures(data_set):
        raise UsageError(f"{data_set.root}: --interventions draws creatures; it needs a generated data set (`demo`)")
    objects = None if options.annotations is None else Path(options.annotations)
    return EvaluationInputs(
        data_set,
        samples,
        cub.read_parts(data_set.root, samples) if options.parts and cub.has_parts(data_set) else None,
        annotate(data_set, samples, boxes=options.boxes, parts=options.parts, objects=objects),
        [] if options.background is None else read_background(options.background, data_set),
    )


def has_validation_images(metadata: Metadata, inputs: EvaluationInputs, options: EvaluateOptions) -> bool:
    """Return whether training set aside these images and crops, as far as the model's record tells."""
    data = metadata.training.get("data")
    # the model may have been trained on images of a different validation set
    same_images = not isinstance(data, dict) or data.get("val") in (None, len(inputs.samples))
    same_crop = metadata.crop == (inputs.data.crop if options.boxes else None)
    return options.split == "val" and same_images and same_crop


def check_model(path: Path, metadata: Metadata, options: EvaluateOptions) -> None:
    """Check that a model has the outputs and the evidence that the options need.

    Raises:
        UsageError: it lacks some, or its file cannot store an evaluation.
    """
    check_all_outputs(metadata, str(path), "`evaluate`")
    is_checkpoint, evidence = model_kind(path) == "checkpoint", metadata.evidence
    # a model without prototypes is explained by Grad-CAM, which needs gradients
    by_gradients = options.interventions and evidence == "none"
    needs_cells = {
        "--faithfulness": options.faithfulness,
        "--randomise": options.randomise,
        "--interventions": options.interventions and not by_gradients,
        "--record": options.record,
    }
    for flag in (flag for flag, wanted in needs_cells.items() if wanted and evidence != "exact"):
        raise UsageError(f"{path}: no single cell is its evidence (evidence {evidence}); leave {flag} out")
    needs_network = {
        "--attack-outside": options.attack_outside,
        "--randomise": options.randomise,
        "--interventions": by_gradients,
        "--background": options.background is not None,
    }
    for flag in (flag for flag, wanted in needs_network.items() if wanted and not is_checkpoint):
        raise UsageError(f"{path}: {flag} needs the checkpoint that it was exported from")
    by_gradients = options.interventions or options.faithfulness or (options.attack_outside and evidence == "none")
    if is_checkpoint and by_gradients:
        require("captum", "evaluate", "Grad-CAM")
    if options.attack_outside and evidence == "map":
        raise UsageError(f"{path}: it averages over all cells (evidence map), so nothing lies outside its evidence")
    if options.target_error is not None and evidence == "none":
        raise UsageError(f"{path}: it has no prototypes (evidence none), so no margins; leave --target-error out")
    if options.record and is_checkpoint and metadata.source.get("format") == "authors":
        raise UsageError(
            f"{path}: a bare state dict cannot store an evaluation; export it, and use --record with the export"
        )
    if options.background is not None and (not options.record or options.split != "val"):
        raise UsageError("--background: its features are stored with the baseline; add --split val --record")


def check_classes(path: Path, class_names: list[str], data_set: DataSet) -> None:
    """Raise UsageError unless the model's classes are the data set's, in the same order."""
    pairs = itertools.zip_longest(class_names, data_set.class_names)
    for number, (model_name, data_name) in enumerate(pairs, 1):
        if model_name != data_name:
            raise UsageError(
                f"{path} knows {pluralize(len(class_names), 'class', 'classes')}, {data_set.root} has "
                f"{len(data_set.class_names)}: number {number} is {model_name!r} in the model and {data_name!r} in the "
                "data set; they must be the same, in the same order; give the data set that the model was trained on"
            )


def _describe_trained_images(path: Path, training: dict[str, Any], data_set: DataSet, split: str) -> str:
    """Return a warning that a model may have been trained on the measured images; else nothing."""
    root = find_root(training, path)
    if split not in ("train", "all") or root is None:
        return ""
    trained, measured = root.resolve(), data_set.root.resolve()
    if not (trained.is_relative_to(measured) or measured.is_relative_to(trained)):
        return ""
    return f"{path} was trained on images in {root}, perhaps on these; new images would give lower figures"


def describe_crop_mismatch(path: Path, trained: str | None, data_set: DataSet, *, boxes: bool) -> str:
    """Return a warning that images are cropped differently than in training; else nothing."""
    measured = data_set.crop if boxes else None
    if trained == measured:
        return ""
    if measured is not None:
        return f"{path} was trained on whole images but is measured on crops; see --no-boxes"
    advice = "see --boxes" if data_set.crop else "the data set has no boxes"
    return f"{path} was trained on images cropped to boxes but is measured on whole ones; {advice}"
