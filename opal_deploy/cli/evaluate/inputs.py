"""The options, models and images of an evaluation, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.cli.console import one_line, print_message
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.datasets.cub import PartLocations
    from opal_deploy.datasets.samples import DataSet, Sample
    from opal_deploy.evaluation.annotations import Annotations
    from opal_deploy.evaluation.faithfulness.perturbation import Baseline
    from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of `evaluate` that its measurements read.

    Attributes:
        split: `train`, `val`, `test` or `all`.
        boxes: crop to the data set's boxes.
        parts: measure on part locations; None: where the data set has them.
        annotations: COCO file with the boxes of the objects; None: what the data set knows.
        seed: of all random numbers.
        device, threads: of the runtime.
        batch: images a forward pass.
        faithfulness: measure it.
        limit: images that faithfulness is measured on.
        baselines: that replace removed cells.
        target_error: error rate, 0 ... 1, to choose a threshold for; None for no threshold.
    """

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


@dataclass(frozen=True)
class EvaluationInputs:
    """The images of one split, and their annotations as far as the options use them.

    Attributes:
        root: of the data set.
        samples: at least one.
        part_locations: of a CUB data set; otherwise None.
        annotations: of the samples, for the pointing game; they may know nothing.
    """

    root: Path
    samples: list[Sample]
    part_locations: PartLocations | None
    annotations: Annotations


def parse_baselines(names: Sequence[str] | None) -> tuple[Baseline, ...]:
    """Return the baselines of --fill without repetition; all of them for None.

    Raises:
        UsageError: there is no such baseline.
    """
    from opal_deploy.evaluation.faithfulness.perturbation import BASELINES

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
    from opal_deploy.artifact.metadata import check_all_outputs
    from opal_deploy.evaluation.faithfulness import measure

    check_all_outputs(metadata, str(path), "`evaluate`")
    if options.faithfulness:
        measure.check_evidence(metadata, str(path))
    if options.target_error is not None and metadata.evidence == "none":
        raise UsageError(f"{path}: it has no prototypes (evidence none), so no margins; leave --target-error out")


def open_model(path: Path, device: str, threads: int | None) -> Session:
    """Open a model in the runtime that runs it."""
    from opal_deploy.runtime.select import open_sessions

    return open_sessions(path, device=device, threads=threads)[0]


def read_model_metadata(path: Path) -> Metadata:
    """Return a model's metadata without opening a runtime, so that a wrong second model is found before the first runs.

    Raises:
        UsageError: not one of ours, or damaged.
    """
    from opal_deploy.artifact import engine_file, onnx_file
    from opal_deploy.artifact.files import model_kind

    kind = model_kind(path)
    if kind == "checkpoint":
        from opal_deploy.model import checkpoint

        return checkpoint.build_metadata(checkpoint.load(path))
    if kind == "engine":
        return engine_file.read_sidecar(path).metadata
    if kind == "onnx":
        return onnx_file.read_metadata(path)
    raise UsageError(f"{path}: not a model that this version runs; expected .onnx, .engine, .pt or .pth")


def check_classes(path: Path, class_names: list[str], data_set: DataSet) -> None:
    """Check that the model's classes are those of the data set, in the same order.

    Raises:
        UsageError: they are not.
    """
    from opal_deploy.datasets.samples import pluralize

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


def warn_crop_mismatch(path: Path, trained: str | None, data_set: DataSet, *, boxes: bool) -> None:
    """Warn if the model is evaluated on images cropped in another way than those it was trained on."""
    measured = data_set.crop if boxes else None
    if trained == measured:
        return
    if measured is not None:
        mismatch = (
            "says it was trained on whole images and is measured on images cropped to their boxes; see --no-boxes"
        )
    else:
        advice = "see --boxes" if data_set.crop else "the data set has no boxes"
        mismatch = f"says it was trained on images cropped to their boxes and is measured on whole ones; {advice}"
    print_message(f"warning: {one_line(str(path))} {mismatch}")


def select_inputs(data_set: DataSet, options: EvaluateOptions) -> EvaluationInputs:
    """Return the samples of the split, with the annotations that the options and the data set allow.

    Raises:
        UsageError: the split is too small for the error rate, or annotations are missing or damaged.
    """
    from opal_deploy.datasets import cub
    from opal_deploy.evaluation.annotations import annotate, has_creatures
    from opal_deploy.evaluation.risk import check_support

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
        data_set.root,
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


def warn_trained_images(path: Path, training: dict[str, Any], data_set: DataSet, split: str) -> None:
    """Warn if a model is evaluated on images of the folder that it was trained on, or of one inside or around it."""
    data = training.get("data")
    root = data.get("root") if isinstance(data, dict) else None
    if split not in ("train", "all") or not isinstance(root, str):
        return
    trained, measured = Path(root).resolve(), data_set.root.resolve()
    if trained.is_relative_to(measured) or measured.is_relative_to(trained):
        print_message(
            f"warning: {one_line(str(path))} was trained on images in {one_line(root)}, perhaps on some of those "
            "that it is measured on; figures on these are better than on new ones"
        )


def check_validation(path: Path, training: dict[str, Any], data_set: DataSet, split: str) -> None:
    """Raise UsageError if a model was trained on images that the data set has in another split than it."""
    from opal_deploy.datasets.samples import recorded_validation

    if split in ("test", "all") or data_set.validation is None:
        return
    if recorded_validation(training) != data_set.validation:
        raise UsageError(
            f"{path}: its validation images are not those of the first model, so that it has trained on some of them; "
            "evaluate the two apart, or take --split test"
        )
