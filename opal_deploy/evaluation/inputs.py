"""The options, models and images of an evaluation, checked before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.metadata import Metadata, check_all_outputs
from opal_deploy.datasets import cub
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, Sample, pluralize
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.annotations import Annotations, annotate, has_creatures
from opal_deploy.evaluation.faithfulness import measure
from opal_deploy.evaluation.faithfulness.perturbation import BASELINES, Baseline
from opal_deploy.evaluation.risk import check_support
from opal_deploy.inference.api import Model
from opal_deploy.logs import Log, Progress
from opal_deploy.runtime.select import open_sessions, read_model_metadata
from opal_deploy.runtime.session import Session

SPLITS = ("test", "val", "train", "all")


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of an evaluation; see `evaluate_model`.

    Attributes:
        baselines: what removed cells are replaced by.
        target_error: error rate, 0 ... 1, to choose a threshold for; None for no threshold.
    """

    dataset: str | None
    partition: int
    skip_missing: bool
    split: str
    boxes: bool
    parts: bool | None
    annotations: Path | None
    seed: int
    device: str
    threads: int | None
    batch: int
    faithfulness: bool
    limit: int
    baselines: tuple[Baseline, ...]
    target_error: float | None

    def __post_init__(self) -> None:
        """Raise UsageError for values that no evaluation can have."""
        if self.split not in SPLITS:
            raise UsageError(f"split {self.split!r}: expected one of {', '.join(SPLITS)}")
        if min(self.batch, self.limit, 1 if self.threads is None else self.threads) < 1 or self.seed < 0:
            raise UsageError("batch, limit and threads must be at least 1, and the seed not negative")
        if self.target_error is not None and not 0 < self.target_error < 1:
            raise UsageError(f"target_error {self.target_error}: expected a share between 0 and 1, such as 0.05")


@dataclass(frozen=True)
class EvaluationTarget:
    """A model to measure.

    Attributes:
        path: of its file.
        loaded: the model, where the caller has it loaded; None opens the file for the measurement.
    """

    path: Path
    loaded: Model | None = None

    @staticmethod
    def of(model: str | os.PathLike[str] | Model) -> EvaluationTarget:
        """Return the target that a caller named by its path, or has loaded.

        Raises:
            UsageError: there is no such file, or a model was made without one.
        """
        path = model.path if isinstance(model, Model) else Path(model)
        if path is None:
            raise UsageError("this Model has no file; give one that `opal_deploy.load` returned, or a path")
        if not path.is_file():
            raise UsageError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
        return EvaluationTarget(path, model if isinstance(model, Model) else None)

    def open(self, options: EvaluateOptions) -> Session:
        """Return a session of the model, the loaded one's own where there is one."""
        if self.loaded is not None:
            return self.loaded.sessions[0]
        return open_sessions(self.path, device=options.device, threads=options.threads)[0]

    def read_metadata(self) -> Metadata:
        """Return the model's metadata without opening a runtime."""
        return read_model_metadata(self.path) if self.loaded is None else self.loaded.metadata


@dataclass(frozen=True)
class EvaluationInputs:
    """The images of one split, and their annotations as far as the options use them.

    Attributes:
        data: the data set.
        samples: of the split, at least one.
        part_locations: of a CUB data set; otherwise None.
        annotations: of the samples, for the pointing game; they may know nothing.
    """

    data: DataSet
    samples: list[Sample]
    part_locations: PartLocations | None
    annotations: Annotations


def read_inputs(
    data: Path, metadata: dict[Path, Metadata], options: EvaluateOptions, log: Log, report: Progress
) -> EvaluationInputs:
    """Read a data set and check that it fits the models.

    Args:
        data: the data set's folder.
        metadata: of each model by its path.
        options: of the evaluation.
        log: receives what the folder was read as, and warnings.
        report: receives the progress of reading.

    Raises:
        UsageError: the data set is unfit, or does not fit the options or a model.
    """
    data_set = read_dataset(
        data,
        options.dataset,
        partition=options.partition,
        skip_missing=options.skip_missing,
        # a few images a class, all to be measured, need not suffice for a split
        needs_validation=options.split in ("train", "val"),
        progress=report,
    )
    log(f"read as {data_set.describe()}")
    for line in data_set.warnings:
        log(f"warning: {line}")
    check_split(data_set, options.split)
    for path, each in metadata.items():
        check_classes(path, list(each.class_names), data_set)
        for warning in (
            describe_trained_images(path, each.training, data_set, options.split),
            describe_crop_mismatch(path, each.crop, data_set, boxes=options.boxes),
        ):
            if warning:
                log(f"warning: {warning}")
    return select_inputs(data_set, options)


def parse_baselines(names: Sequence[str] | None) -> tuple[Baseline, ...]:
    """Return the baselines of --fill without repetition; all of them for None.

    Raises:
        UsageError: there is no such baseline.
    """
    unknown = [name for name in names or () if name not in BASELINES]
    if unknown:
        raise UsageError(f"--fill {unknown[0]!r}: expected {', '.join(BASELINES)}")
    by_name = {str(baseline): baseline for baseline in BASELINES}
    return tuple(by_name[name] for name in dict.fromkeys(names or BASELINES))


def check_evidence(path: Path, metadata: Metadata, options: EvaluateOptions) -> None:
    """Check that a model has the outputs and the evidence that the options measure.

    Raises:
        UsageError: it has not.
    """
    check_all_outputs(metadata, str(path), "`evaluate`")
    if options.faithfulness:
        measure.check_evidence(metadata, str(path))
    if options.target_error is not None and metadata.evidence == "none":
        raise UsageError(f"{path}: it has no prototypes (evidence none), so no margins; leave --target-error out")


def check_classes(path: Path, class_names: list[str], data_set: DataSet) -> None:
    """Check that the model's classes are those of the data set, in the same order.

    Raises:
        UsageError: they are not.
    """
    expected_names = data_set.class_names
    if class_names == expected_names:
        return
    expected = "they must be the same, in the same order; give the data set that the model was trained on"
    if len(class_names) != len(expected_names):
        raise UsageError(
            f"{path} knows {pluralize(len(class_names), 'class', 'classes')} ({class_names[0]}, ...), "
            f"{data_set.root} has {len(expected_names)} ({expected_names[0]}, ...); {expected}"
        )
    pairs = zip(class_names, expected_names, strict=True)
    number, model_name, data_name = next((i, a, b) for i, (a, b) in enumerate(pairs, 1) if a != b)
    raise UsageError(
        f"{path} and {data_set.root} have {len(class_names)} classes each, but number {number} is {model_name!r} to "
        f"the model and {data_name!r} in the data set; {expected}"
    )


def describe_crop_mismatch(path: Path, trained: str | None, data_set: DataSet, *, boxes: bool) -> str:
    """Return that a model is evaluated on images cropped in another way than those it was trained on; else nothing."""
    measured = data_set.crop if boxes else None
    if trained == measured:
        return ""
    if measured is not None:
        mismatch = (
            "says it was trained on whole images and is measured on images cropped to their boxes; see --no-boxes"
        )
    else:
        advice = "see --boxes" if data_set.crop else "the data set has no boxes"
        mismatch = f"says it was trained on images cropped to their boxes and is measured on whole ones; {advice}"
    return f"{path} {mismatch}"


def select_inputs(data_set: DataSet, options: EvaluateOptions) -> EvaluationInputs:
    """Return the samples of the split, with the annotations that the options and the data set allow.

    Raises:
        UsageError: the split is too small for the error rate, or annotations are missing or damaged.
    """
    samples = data_set.select(options.split)
    if options.target_error is not None:
        check_support(len(samples), options.target_error)
    located, generated = cub.has_parts(data_set), has_creatures(data_set)
    if options.parts and not located and not generated:
        raise UsageError(
            f"{data_set.root}: it has no part locations (parts/part_locs.txt of CUB, parts.jsonl of the generated "
            "set); leave --parts out"
        )
    use_parts = options.parts is not False
    return EvaluationInputs(
        data_set,
        samples,
        cub.read_parts(data_set.root, samples) if use_parts and located else None,
        annotate(data_set, samples, boxes=options.boxes, parts=use_parts, objects=options.annotations),
    )


def check_split(data_set: DataSet, split: str) -> None:
    """Raise UsageError if a split has no images."""
    if not data_set.select(split):
        count = len(data_set.select("all"))
        raise UsageError(
            f"{data_set.root}: it has no {split} images; give --split all for all {count:,} if they were kept from "
            "training, or --split val for those that `train` sets aside"
        )


def describe_trained_images(path: Path, training: dict[str, Any], data_set: DataSet, split: str) -> str:
    """Return that a model was trained on images of the folder, or of one inside or around it; else nothing."""
    data = training.get("data")
    root = data.get("root") if isinstance(data, dict) else None
    if split not in ("train", "all") or not isinstance(root, str):
        return ""
    trained, measured = Path(root).resolve(), data_set.root.resolve()
    if not (trained.is_relative_to(measured) or measured.is_relative_to(trained)):
        return ""
    return (
        f"{path} was trained on images in {root}, perhaps on some of those that it is measured on; figures on these "
        "are better than on new ones"
    )
