"""The models and images of an evaluation, and whether they fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.cli.console import one_line, print_message
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.datasets.samples import DataSet, Sample
    from opal_deploy.runtime.session import Session


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
    from opal_deploy.model import checkpoint

    kind = model_kind(path)
    if kind == "checkpoint":
        return checkpoint.build_metadata(checkpoint.load(path))
    if kind == "engine":
        return engine_file.read_sidecar(path).metadata
    if kind == "onnx":
        return onnx_file.read_metadata(path)
    raise UsageError(f"{path}: not a model that this version runs; expected .onnx, .engine, .pt or .pth")


def check_classes(path: Path, names: list[str], data_set: DataSet) -> None:
    """Check that the model's classes are those of the data set, in the same order.

    Raises:
        UsageError: they are not.
    """
    from opal_deploy.datasets.samples import pluralize

    theirs = data_set.class_names
    if names == theirs:
        return
    expected = "they must be the same, in the same order; give the data set that the model was trained on"
    if len(names) != len(theirs):
        raise UsageError(
            f"{path} knows {pluralize(len(names), 'class', 'classes')} ({names[0]}, ...), "
            f"{data_set.root} has {len(theirs)} ({theirs[0]}, ...); {expected}"
        )
    number, (ours, other) = next(
        (i, pair) for i, pair in enumerate(zip(names, theirs, strict=True), 1) if len({*pair}) > 1
    )
    raise UsageError(
        f"{path} and {data_set.root} have {len(names)} classes each, but number {number} is {ours!r} to the model and "
        f"{other!r} in the data set; {expected}"
    )


def warn_crop_mismatch(path: Path, trained: str | None, data_set: DataSet, *, boxes: bool) -> None:
    """Warn if the model is evaluated on images cropped in another way than those it was trained on."""
    measured = data_set.crop if boxes else None
    if trained == measured:
        return
    if measured is not None:
        words = "says it was trained on whole images and is measured on images cropped to their boxes; see --no-boxes"
    else:
        why = "see --boxes" if data_set.crop else "the data set has no boxes"
        words = f"says it was trained on images cropped to their boxes and is measured on whole ones; {why}"
    print_message(f"warning: {one_line(str(path))} {words}")


def select_samples(data_set: DataSet, split: str) -> list[Sample]:
    """Return the samples of a split.

    Raises:
        UsageError: there are none.
    """
    samples: list[Sample] = getattr(data_set, split)
    if not samples:
        raise UsageError(f"{data_set.root}: it has no {split} images; choose another --split")
    return samples
